"""The local engine keeps the contract of engines: with the fast decoder, and through Transformers."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lib.generation import local
from grpo_lib.generation.local import LocalEngine
from grpo_lib.models import load_model, load_tokenizer
from tests.unit.generation.contract import EOS, EngineContract, request


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(folder: Path, **options: Any) -> LocalEngine:
    model = load_model(str(folder), torch.float32, "cpu")
    return LocalEngine(model, eos_token_ids=[EOS], tokenizer=load_tokenizer(str(folder)), **options)


class TestLocalEngine(EngineContract):
    tolerance = 1e-5

    @pytest.fixture(scope="class")
    def started(self, folder: Path) -> Iterator[LocalEngine]:
        engine = start(folder)
        assert engine._fast is not None
        yield engine
        engine.close()

    def check_close(self, folder: Path) -> None:
        engine = start(folder)
        engine.generate(request())
        model, weight = weakref.ref(engine._model), weakref.ref(engine._model.lm_head.weight)
        engine.close()
        gc.collect()
        assert model() is None and weight() is None


class TestSmallBatches(TestLocalEngine):
    @pytest.fixture(scope="class")
    def started(self, folder: Path) -> Iterator[LocalEngine]:
        engine = start(folder, max_batch_rows=7)
        yield engine
        engine.close()


class TestThroughTransformers(TestLocalEngine):
    @pytest.fixture(scope="class")
    def started(self, folder: Path) -> Iterator[LocalEngine]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local, "fast_decoder", lambda model: None)
            engine = start(folder)
        yield engine
        engine.close()
