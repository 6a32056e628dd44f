"""What a warm worker says of itself: the answer of its control channel, which it gives while it works, too."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class WorkerStatus(BaseModel):
    """One worker of the cluster at one moment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Name by which a flow finds it again.")
    role: str = Field(description="rollout, train or score.")
    host: str = Field(description="Machine that it runs on; empty where it does not answer.")
    pid: int = Field(description="Its process there; 0 where it does not answer.")
    state: Literal["starting", "idle", "busy", "unreachable"]
    run: str | None = Field(None, description="Run that it works for, or worked for last.")
    stage: str | None = Field(None, description="Stage that it carries out now.")
    iteration: int | None = Field(None, description="Iteration of that stage.")
    shard: int | None = Field(None, description="Shard of that stage; null: a stage of one piece.")
    since: float | None = Field(None, description="When the present state began, in Unix seconds.")
    done: int = Field(0, description="Pieces of the present stage that are done (rows, micro-batches, ...).")
    total: int = Field(0, description="Pieces of the present stage; 0: not known.")
    policy_version: int | None = Field(None, description="Policy loaded; null: none yet.")
    memory_bytes: int = Field(0, description="Resident memory of its process and the processes that it started.")
    gpu_memory_bytes: int = Field(0, description="GPU memory that it holds.")
    code: str = Field("", description="Digest of the code it was born with; it must be that of the flow.")
    versions: dict[str, str] = Field(default_factory=dict, description="Of Python and the packages that compute.")
    key: str | None = Field(None, description="Of the present stage: a flow that asks for the same joins it.")
    epoch: int | None = Field(None, description="Number of the flow that owns it; calls of an older one are refused.")
    gpus: float = Field(0, description="GPUs that it was placed with.")
