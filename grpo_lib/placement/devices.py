"""Devices and threads of this process."""

import torch

from grpo_lib.errors import ConfigError


def torch_device(name: str) -> torch.device:
    """The device that a configuration means.

    Raises:
        ConfigError: a CUDA device that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"placement.device={name!r} is no device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"placement.device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    return device


def use_threads(count: int | None) -> None:
    """CPU threads of torch in this process; ``None`` leaves them as they are. Results depend on it in the last bits."""
    if count is not None:
        torch.set_num_threads(count)
