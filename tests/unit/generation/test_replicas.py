"""Several engines that share the rows keep the contract of one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_lib.errors import ParityError
from grpo_lib.generation.local import LocalEngine
from grpo_lib.generation.replicas import Replicas
from grpo_lib.models import load_model, load_tokenizer
from tests.unit.generation.contract import EOS, EngineContract, make_model, request, rows_of


def start(folder: Path) -> LocalEngine:
    model = load_model(str(folder), torch.float32, "cpu")
    return LocalEngine(model, eos_token_ids=[EOS], tokenizer=load_tokenizer(str(folder)))


class TestReplicas(EngineContract):
    tolerance = 1e-5
    test_closing_frees_memory = None  # type: ignore[assignment]  # that of its engines, which are tested alone

    @pytest.fixture(scope="class")
    def started(self, folder: Path) -> Iterator[Replicas]:
        engine = Replicas([start(folder), start(folder)])
        yield engine
        engine.close()

    def test_rows_are_those_of_one_engine(self, folder: Path, started: Replicas) -> None:
        started.load(make_model(0).state_dict())
        alone = start(folder)
        for prompts in ([[5, 6]], [[5, 6], [7], [8, 9, 3]]):  # fewer prompts than engines, too
            asked = request(prompts, n=4)
            assert rows_of(started.generate(asked)) == rows_of(alone.generate(asked))

    def test_engines_with_different_weights_have_no_digest(self, folder: Path) -> None:
        engines = [start(folder), start(folder)]
        engines[1].load(make_model(1).state_dict())
        with pytest.raises(ParityError, match="the 2 local engines hold different weights"):
            Replicas(engines).digest()
