"""Checkpoints: the whole training state as files that any tool reads (safetensors and JSON)."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_lib.storage.keys import StageSpec
from grpo_lib.training.base import Trainer

CHECKPOINT = StageSpec(name="checkpoint", version=1, reads=())


@contextmanager
def checkpoint_files(trainer: Trainer, tokenizer: Any) -> Iterator[list[Path]]:
    """Model and tokenizer in Hugging Face format, optimizer and step, as files in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="grpo-checkpoint-") as name:
        folder = Path(name)
        trainer.save(folder)
        tokenizer.save_pretrained(folder)
        yield sorted(path for path in folder.iterdir() if path.is_file())
