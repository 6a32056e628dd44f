"""Where the stages of a run work, and how far rollouts may run ahead of training. Part of ``RunConfig``."""

from typing import Literal

from pydantic import Field, model_validator

from grpo_lib.config_base import Section


class RayConfig(Section):
    """Workers of a Ray cluster, with placement.kind=ray."""

    address: str = Field(
        "auto", min_length=1, description="HOST:PORT of the head; auto: the one that runs on this machine."
    )
    rollout_workers: int = Field(
        1, ge=0, le=1024, description="Workers that generate and share the shards; 0: the train worker does it too."
    )
    score_workers: int = Field(
        0, ge=0, le=1024, description="Workers that judge and share the shards; 0: rewards are made where the flow is."
    )
    rollout_gpus: float = Field(0, ge=0, description="GPUs of a rollout worker.")
    train_gpus: float = Field(0, ge=0, description="GPUs of the train worker: one a rank.")
    score_gpus: float = Field(0, ge=0, description="GPUs of a score worker.")
    stage_seconds: float = Field(
        7200, gt=0, description="A stage that is not done after so long on a worker is cancelled; above the longest."
    )


class PlacementConfig(Section):
    """Where stages run."""

    kind: Literal["local", "ray"] = Field(
        "local", description="`local`: in this process. `ray`: on workers of their own; engines stay warm in both."
    )
    ray: RayConfig = RayConfig()
    wait: float = Field(
        120, gt=0, description="Seconds that a run waits for a worker that nobody offers, or that starts again."
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$", description="auto, cpu, cuda or cuda:N.")
    threads: int | None = Field(None, ge=1, description="CPU threads of torch; null: torch's own choice.")
    ranks: int = Field(1, ge=1, le=1024, description="Processes of the trainer (backends fsdp2 and deepspeed).")
    rank_timeout_seconds: float = Field(
        1800, gt=0, description="A rank that does not answer for so long counts as lost; above the longest update."
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="Of one device, for model FLOPs utilisation; null: known for common GPUs."
    )

    @model_validator(mode="after")
    def _device_is_the_workers(self) -> "PlacementConfig":
        if self.kind == "ray" and self.device.startswith("cuda:"):
            raise ValueError(f"device={self.device}: a Ray worker sees the GPUs that Ray gives it; set device=cuda")
        return self


class PipelineConfig(Section):
    """Rollouts ahead of training."""

    max_staleness: Literal[0, 1, 2] = Field(
        0,
        description="Iterations that a rollout's policy may be behind the one that learns from it: with 1 the next "
        "rollouts are generated while the update runs. Needs a correction of the rollouts' log-probs.",
    )
