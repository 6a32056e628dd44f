"""The configuration of a run: one frozen pydantic model, free of heavy imports.

YAML files, ``key=value`` overrides and the form in the Prefect UI all come from ``RunConfig``. What can be refused is
refused here: unknown keys, values out of bounds, and settings that contradict each other; the message names the
value, the bound and the remedy.
"""

import hashlib
import json
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from grpo_lib.config_algorithm import AlgorithmConfig
from grpo_lib.config_base import RUN_NAME, Section, UrlWithoutSecrets
from grpo_lib.config_branch import BranchConfig
from grpo_lib.config_data import DataConfig
from grpo_lib.config_placement import PipelineConfig, PlacementConfig
from grpo_lib.config_reward import RewardConfig
from grpo_lib.config_rollout import RolloutConfig

MAX_POSITIONS = 4096
"""Of the small model."""
MAX_ADAPTER_RANK = 512
"""That vLLM takes."""


class StoreConfig(Section):
    """Where datasets and checkpoints live."""

    uri: UrlWithoutSecrets = Field("grpo-store", min_length=1, description="A folder, or s3://bucket/prefix.")
    endpoint_url: UrlWithoutSecrets | None = Field(None, description="S3 endpoint, for services other than AWS.")
    region: str | None = Field(None, description="S3 region; credentials come from the environment, never from here.")
    patience_seconds: float = Field(
        120, ge=0, description="So long an S3 service that is away is asked again; wrong credentials fail at once."
    )


class SmallModelConfig(Section):
    """Shape of a small Qwen3-style model that is made from nothing."""

    hidden_size: int = Field(96, ge=8, le=8192, description="Width of the residual stream.")
    layers: int = Field(3, ge=1, le=128, description="Decoder layers.")
    heads: int = Field(4, ge=1, le=128, description="Query heads.")
    kv_heads: int = Field(1, ge=1, le=128, description="Key-value heads; one makes decoding fastest.")
    head_dim: int = Field(32, ge=8, le=256, multiple_of=2, description="vLLM on CPU takes 32, 64, 80, 96, 112, 128.")
    mlp_size: int = Field(256, ge=8, le=65536, description="Width inside the MLP.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary embedding.")
    initializer_range: float = Field(0.08, gt=0, le=1, description="0.02 learns arithmetic far more slowly.")

    @model_validator(mode="after")
    def _heads_divide(self) -> "SmallModelConfig":
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        return self


class StartConfig(Section):
    """A policy of another run of the same store, to start from."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="Name of the run.")
    version: int = Field(ge=1, description="Policy after so many updates; it must have a checkpoint.")


class ModelConfig(Section):
    """The policy to start from: a pretrained model, or a small one made on the spot by the warm start."""

    path: str | None = Field(
        None,
        min_length=1,
        description="Folder or hub name of a pretrained model; null makes the `small` one and warm-starts it.",
    )
    start: StartConfig | None = Field(
        None, description="Weights of another run's policy; `path` (null: the small model) says the tokenizer."
    )
    small: SmallModelConfig = SmallModelConfig()
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of weights in forward and backward passes.")
    prompt_format: Literal["plain", "chat"] = Field(
        "plain", description="`chat` renders prompts with the tokenizer's chat template; `plain` takes them as is."
    )
    system_prompt: str | None = Field(None, description="With prompt_format=chat: the system message.")

    @model_validator(mode="after")
    def _system_needs_chat(self) -> "ModelConfig":
        if self.system_prompt is not None and self.prompt_format != "chat":
            raise ValueError("system_prompt is only used with prompt_format=chat; set that, or remove system_prompt")
        return self


class WarmStartConfig(Section):
    """Supervised fine-tuning on demonstrations, from random weights, before RL."""

    steps: int = Field(1100, ge=1, description="Optimizer steps.")
    batch_size: int = Field(32, ge=1, description="Demonstrations a step.")
    demonstrations: int = Field(20_000, ge=1, description="At most so many training prompts get a demonstration.")
    muon_lr: float = Field(0.02, gt=0, description="Muon, for all matrices but the embedding.")
    adamw_lr: float = Field(3e-3, gt=0, description="AdamW, for the embedding and vectors.")
    warmup_steps: int = Field(20, ge=0, description="Steps in which the rate rises.")
    final_lr_fraction: float = Field(0.05, ge=0, le=1, description="Of the rate, at the last step.")
    max_grad_norm: float = Field(1.0, gt=0, description="Bound on the gradient norm.")
    max_tokens: int = Field(512, ge=8, description="Longer demonstrations are left out and counted.")


class ParityConfig(Section):
    """The gate between engine and trainer: both must give the same log-probs for the same tokens."""

    rows: int = Field(4, ge=1, description="Rows of each rollout shard that are checked.")
    max_mean: float | None = Field(
        None,
        gt=0,
        description="Mean absolute difference above which the run stops; null: 1e-3 in float32, 0.05 in bfloat16.",
    )


class OptimizerConfig(Section):
    """AdamW and its schedule, counted in optimizer steps."""

    lr: float = Field(1e-6, gt=0, le=1, description="Learning rate of AdamW.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Decoupled; matrices only.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Of the learning rate, after the warm-up."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps in which the rate rises.")
    decay_steps: int | None = Field(
        None, ge=1, description="Steps until the schedule's end; null: all optimizer steps of the run."
    )
    final_lr_fraction: float = Field(0.1, ge=0, le=1, description="Of the rate, at the end of the schedule.")
    max_grad_norm: float = Field(1.0, gt=0, description="Bound on the gradient norm.")


class LoraConfig(Section):
    """Low-rank adapters: only they learn, and the reference policy is the model without them."""

    rank: int = Field(16, ge=1, le=4096, description="Of the adapters' matrices.")
    alpha: float = Field(32.0, gt=0, description="Adapters count alpha / rank times.")
    targets: str | list[str] = Field(
        "all-linear", description="Names of the layers that get one; `all-linear`: all but the head."
    )


class DeepSpeedConfig(Section):
    """ZeRO, with trainer.backend=deepspeed."""

    stage: Literal[0, 1, 2, 3] = Field(
        2, description="Sharded over the ranks: 1 optimizer state, 2 gradients too, 3 weights too; 0: nothing."
    )
    offload_optimizer: bool = Field(False, description="Optimizer state and step on the CPU; from stage 1.")
    offload_parameters: bool = Field(False, description="Sharded weights wait on the CPU; stage 3.")

    @model_validator(mode="after")
    def _offload_fits(self) -> "DeepSpeedConfig":
        if self.offload_optimizer and self.stage == 0:
            raise ValueError("offload_optimizer=true needs stage 1, 2 or 3: stage 0 has no optimizer state of its own")
        if self.offload_parameters and self.stage != 3:
            raise ValueError(f"offload_parameters=true needs stage=3, where weights are sharded; stage is {self.stage}")
        return self


class TrainerConfig(Section):
    """How an iteration's rollouts become optimizer steps."""

    backend: Literal["torch", "fsdp2", "deepspeed"] = Field(
        "torch",
        description="`torch`: one process, CPU or one GPU. `fsdp2`, `deepspeed`: placement.ranks processes.",
    )
    epochs: int = Field(1, ge=1, description="Passes over an iteration's rollouts.")
    mini_batch_prompts: int | None = Field(
        None, ge=1, description="Whole groups an optimizer step; null: one step a pass."
    )
    max_tokens: int = Field(16_384, ge=8, description="Tokens a micro-batch, padding included.")
    layout: Literal["auto", "padded", "packed"] = Field(
        "auto",
        description="`packed`: rows one after another, without padding. `padded`: rectangles of rows of similar "
        "length. `auto`: packed if the model's attention can keep packed rows apart.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Decoder layers run again in the backward pass instead of keeping what they computed."
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    max_skipped: int = Field(3, ge=0, description="Non-finite gradients skipped in one iteration before it fails.")
    max_kl: float | None = Field(
        None,
        gt=0,
        description="An iteration ends before the first step whose mini-batch is further (update/approx_kl) from the "
        "old policy; null: never early.",
    )
    lora: LoraConfig | None = Field(None, description="Train adapters instead of all weights.")
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()


class CriticConfig(Section):
    """The critic of PPO: a copy of the policy's backbone with a value head, trained beside the policy."""

    lr: float = Field(1e-5, gt=0, le=1, description="Learning rate of AdamW; the policy's may be lower.")
    value_clip: float | None = Field(
        0.2, gt=0, description="A value may move so far from its old one before its loss goes flat; null: not clipped."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Bound on the critic's gradient norm.")
    warmup_iterations: int = Field(0, ge=0, description="First iterations in which only the critic learns.")


class ReferenceConfig(Section):
    """The policy that the KL is taken to: the one that the run starts from, unless something is set here."""

    path: str | None = Field(None, min_length=1, description="Folder or hub name of another model to begin with.")
    every: int | None = Field(
        None, ge=1, description="Iterations after which it is brought up to date; null: it stays as it is."
    )
    decay: float = Field(
        0.0, ge=0, lt=1, description="With `every`: how much of it stays, the rest is the policy; 0: it is replaced."
    )

    @model_validator(mode="after")
    def _decay_needs_every(self) -> "ReferenceConfig":
        if self.decay and self.every is None:
            raise ValueError(f"decay={self.decay} is only used with `every`; set every=1, or remove decay")
        return self

    @property
    def initial(self) -> bool:
        """It is the policy that the run starts from, all the time."""
        return self.path is None and self.every is None


class EvaluationConfig(Section):
    """Held-out accuracy: before training, every so many iterations, and at the end."""

    every: int = Field(20, ge=1, description="Iterations between evaluations.")
    prompts: int = Field(1024, ge=1, description="Held-out prompts, from the first.")
    samples: int = Field(2, ge=0, description="Sampled responses a prompt, at the rollout temperature; 0: greedy only.")
    greedy: bool = Field(True, description="Also one response of the most likely tokens.")
    pass_k: list[int] = Field([1, 2], description="The k of pass@k and maj@k; at most `samples`.")

    @model_validator(mode="after")
    def _something_to_do(self) -> "EvaluationConfig":
        if not self.greedy and self.samples == 0:
            raise ValueError("samples=0 and greedy=false evaluate nothing; set one of them")
        wrong = [k for k in self.pass_k if k < 1 or (self.samples and k > self.samples)]
        if wrong:
            raise ValueError(f"pass_k={wrong} must be between 1 and samples={self.samples}")
        return self


class CheckpointConfig(Section):
    """Full training state: weights, optimizer, step, critic."""

    every: int = Field(20, ge=1, description="Iterations between checkpoints; updates since the last are replayed.")


class TrackingConfig(Section):
    """MLflow, and the pages of Prefect."""

    uri: UrlWithoutSecrets | None = Field(
        None, description="Tracking URI; null: SQLite beside the store (or ./mlflow.db for S3)."
    )
    experiment: str = Field("grpo", min_length=1, description="Name of the MLflow experiment.")
    rollout_samples: int = Field(64, ge=0, description="Rows of an evaluation in MLflow's table.")
    page_seconds: float = Field(
        10, ge=1, description="So often at most, and at the end, Prefect's page of the run is brought up to date."
    )
    system_seconds: float | None = Field(
        10, ge=1, description="Seconds between samples of CPU, memory, disk, network and GPUs in MLflow; null: none."
    )
    registered_model: str | None = Field(
        None,
        pattern=RUN_NAME,
        description="MLflow's registered model that gets a version for each checkpoint; null: none.",
    )
    sweep: str | None = Field(
        None, pattern=RUN_NAME, description="The sweep whose run in MLflow is this one's parent; `grpo sweep` sets it."
    )
    patience_seconds: float = Field(
        120, ge=0, description="So long an MLflow server that is away is asked again; a refusal fails at once."
    )


class RunConfig(Section):
    """A training run."""

    name: str | None = Field(
        None,
        pattern=RUN_NAME,
        description="Name of the run; null: the problem and a digest of the configuration.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Every random number of the run comes from it.")
    iterations: int = Field(120, ge=1, le=999_999, description="How many.")
    data: DataConfig = Field(description="The problem: prompts and how to judge responses.")
    store: StoreConfig = StoreConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig | None = Field(None, description="Needed without model.path, and only then.")
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    parity: ParityConfig = ParityConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig | None = Field(None, description="Needed by advantage estimators that use values (gae).")
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    placement: PlacementConfig = PlacementConfig()
    pipeline: PipelineConfig = PipelineConfig()
    branch: BranchConfig | None = Field(None, description="Of which run this is a branch; `grpo rerun` sets it.")

    @field_validator("name")
    @classmethod
    def _not_a_command(cls, name: str | None) -> str | None:
        if name == "algorithms":
            raise ValueError("`grpo show algorithms` lists the algorithms; give the run another name")
        return name

    @model_validator(mode="after")
    def _parts_fit(self) -> "RunConfig":
        rollout, trainer, optimizer = self.rollout, self.trainer, self.trainer.optimizer
        if self.branch is not None and self.name in (None, self.branch.run):
            raise ValueError(f"a branch of run {self.branch.run!r} needs a name of its own: set name")
        if self.model.start is not None and self.warm_start is not None:
            raise ValueError(
                f"model.start={self.model.start.run!r} and warm_start exclude each other: the policy is there already; "
                "set warm_start=null"
            )
        if self.model.path is None and self.warm_start is None and self.model.start is None:
            raise ValueError("model.path is null and there is no warm_start: name a model, or add `warm_start: {}`")
        if self.model.path is not None and self.warm_start is not None:
            raise ValueError(
                f"model.path={self.model.path!r} and warm_start exclude each other: "
                "the warm start makes a small model of its own; remove one"
            )
        if self.model.path is None and self.model.prompt_format == "chat":
            raise ValueError("prompt_format=chat needs a model with a chat template, the small one has none: use plain")
        if trainer.mini_batch_prompts is not None and trainer.mini_batch_prompts > rollout.prompts:
            raise ValueError(
                f"trainer.mini_batch_prompts={trainer.mini_batch_prompts} is more than "
                f"rollout.prompts={rollout.prompts}; make it at most that, or null"
            )
        uncorrected = self.algorithm.old_logprobs == "decoupled" and not self.algorithm.rollout_correction.rollout_is
        if rollout.partial is not None and uncorrected:
            raise ValueError(
                "rollout.partial lets several policies draw a response; set "
                "algorithm.rollout_correction.preset=decoupled_token_is to weight their tokens (or "
                "algorithm.old_logprobs=bypass, which takes ratios to the policies that drew them)"
            )
        if self.pipeline.max_staleness and uncorrected:
            raise ValueError(
                f"pipeline.max_staleness={self.pipeline.max_staleness} lets an older policy draw the responses; set "
                "algorithm.rollout_correction.preset=decoupled_token_is to weight their tokens (or "
                "algorithm.old_logprobs=bypass, which takes ratios to the policy that drew them)"
            )
        if self.pipeline.max_staleness and rollout.partial is not None:
            raise ValueError(
                f"rollout.partial and pipeline.max_staleness={self.pipeline.max_staleness} exclude each other: what "
                "goes on is known when an iteration's rollouts are done; remove one"
            )
        if rollout.shaped and uncorrected:
            raise ValueError(
                f"rollout.top_p={rollout.top_p:g}, top_k={rollout.top_k}, min_p={rollout.min_p:g}, "
                f"repetition_penalty={rollout.repetition_penalty:g}: responses are drawn from another distribution "
                "than the policy that is trained; set algorithm.rollout_correction.preset=decoupled_token_is to weight "
                "them (or algorithm.old_logprobs=bypass, which takes ratios to what they were drawn from), or leave "
                "those settings at 1, 0, 0 and 1"
            )
        if rollout.vllm.adapters and (trainer.lora is None or rollout.engine != "vllm"):
            raise ValueError("rollout.vllm.adapters=true needs rollout.engine=vllm and trainer.lora; set both")
        apart = self.placement.kind == "ray" and self.placement.ray.rollout_workers > 0
        if rollout.vllm.adapters and (apart or self.pipeline.max_staleness):
            raise ValueError(
                "rollout.vllm.adapters=true needs the trainer beside the engine; with workers of their own or "
                "pipeline.max_staleness the merged weights are handed over: set adapters=false"
            )
        if rollout.partial is not None and self.algorithm.filters:
            raise ValueError(
                "rollout.partial and algorithm.filters exclude each other: with a budget an iteration takes the "
                "prompts that are finished; remove one"
            )
        if rollout.vllm.adapters and trainer.lora is not None and trainer.lora.rank > MAX_ADAPTER_RANK:
            raise ValueError(
                f"trainer.lora.rank={trainer.lora.rank} is more than vLLM takes ({MAX_ADAPTER_RANK}); lower it, or set "
                "rollout.vllm.adapters=false"
            )
        if not rollout.vllm.own_process and self.placement.device.removeprefix("cuda:") not in (
            "auto", "cpu", "cuda", "0"
        ):  # fmt: skip
            raise ValueError(
                f"placement.device={self.placement.device}: in the trainer's process vLLM takes the first GPU; set "
                "rollout.vllm.own_process=true, or device=cuda and CUDA_VISIBLE_DEVICES"
            )
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens
        if self.model.path is None and longest > MAX_POSITIONS:
            raise ValueError(
                f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}, but the small model has "
                f"{MAX_POSITIONS} positions; lower one of the two"
            )
        if trainer.max_tokens < longest:
            raise ValueError(
                f"trainer.max_tokens={trainer.max_tokens} is below rollout.max_prompt_tokens + rollout.max_new_tokens "
                f"= {longest}; one row must fit into a micro-batch"
            )
        if self.decay_steps is not None and optimizer.warmup_steps >= self.decay_steps:
            raise ValueError(
                f"trainer.optimizer.warmup_steps={optimizer.warmup_steps} leaves nothing of the "
                f"{self.decay_steps} steps of the {optimizer.schedule} schedule"
            )
        if self.evaluation.prompts > self.data.heldout_prompts:
            raise ValueError(
                f"evaluation.prompts={self.evaluation.prompts} is more than "
                f"data.heldout_prompts={self.data.heldout_prompts}; lower the first or raise the second"
            )
        if self.data.problem == "files" and not self.reward.functions:
            raise ValueError(
                "data.problem=files brings no reward; name functions in reward.functions, built in "
                "(`grpo score --help`) or your own: [{path: my_reward.py, name: reward}]"
            )
        train_prompts = getattr(self.data, "train_prompts", None)
        if train_prompts is not None and rollout.prompts > train_prompts:
            raise ValueError(
                f"rollout.prompts={rollout.prompts} is more than data.train_prompts={train_prompts}; lower it"
            )
        kl, rows = self.algorithm.kl, rollout.prompts * rollout.samples
        if kl.controller == "adaptive" and kl.horizon < rows:
            raise ValueError(
                f"algorithm.kl.horizon={kl.horizon:g} is less than the {rows} rows of an iteration; the coefficient "
                f"would jump, or change its sign: make it several times {rows}"
            )
        if trainer.backend == "torch" and self.placement.ranks > 1:
            raise ValueError(
                f"placement.ranks={self.placement.ranks}, but trainer.backend=torch is one process; "
                "take trainer.backend=fsdp2 or deepspeed, or placement.ranks=1"
            )
        if trainer.max_kl is not None and self.steps_per_iteration == 1 and self.algorithm.old_logprobs == "decoupled":
            raise ValueError(
                f"trainer.max_kl={trainer.max_kl:g} can't end an iteration of one optimizer step, whose mini-batch is "
                "at distance 0; set trainer.epochs or trainer.mini_batch_prompts, or remove max_kl"
            )
        if self.critic is not None and self.critic.warmup_iterations >= self.iterations:
            raise ValueError(
                f"critic.warmup_iterations={self.critic.warmup_iterations} leaves the policy none of the "
                f"{self.iterations} iterations; lower it, or raise iterations"
            )
        if trainer.backend != "torch" and self.placement.device.startswith("cuda:"):
            raise ValueError(
                f"placement.device={self.placement.device!r} is one device, but trainer.backend={trainer.backend} "
                "gives rank i device i; set placement.device=cuda and choose devices by CUDA_VISIBLE_DEVICES"
            )
        if not self.reference.initial and kl.coef == 0:
            raise ValueError("reference is set, but algorithm.kl.coef=0 uses none; set a coefficient, or remove it")
        overlong = self.algorithm.overlong.buffer_tokens
        if overlong is not None and overlong > rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens={overlong} is more than rollout.max_new_tokens="
                f"{rollout.max_new_tokens}; the penalty would start before the first token: lower it"
            )
        return self

    @property
    def parity_bound(self) -> float:
        """Mean absolute difference of log-probs above which engine and trainer count as different."""
        if self.parity.max_mean is not None:
            return self.parity.max_mean
        return 1e-3 if self.model.dtype == "float32" else 0.05

    @property
    def decay_steps(self) -> int | None:
        """Optimizer steps over which the schedule runs; None: it is constant, and `iterations` shapes no update."""
        optimizer = self.trainer.optimizer
        if optimizer.schedule == "constant":
            return None
        alone = 0 if self.critic is None else self.critic.warmup_iterations  # the policy takes no steps there
        return optimizer.decay_steps or (self.iterations - alone) * self.steps_per_iteration

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of one iteration."""
        mini_batch = self.trainer.mini_batch_prompts or self.rollout.prompts
        return self.trainer.epochs * -(-self.rollout.prompts // mini_batch)

    @property
    def run_name(self) -> str:
        """The given name, or one made from the problem and everything that shapes the result."""
        if self.name is not None:
            return self.name
        left_out: dict[str, Any] = dict.fromkeys(
            ("name", "store", "tracking", "placement", "checkpoint", "branch"), True
        )
        shaping = self.model_dump(mode="json", exclude=left_out | {"rollout": {"vllm", "server"}})
        digest = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()
        return f"{self.data.problem}-s{self.seed}-{digest[:8]}"
