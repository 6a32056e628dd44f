"""The ``rollout`` section: engines, sampling, and rollouts of several turns or several iterations."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from grpo_lib.config_base import Section, UrlWithoutSecrets


class VllmConfig(Section):
    """vLLM, with rollout.engine=vllm."""

    own_process: bool = Field(True, description="The engine has a process of its own; false: it shares the trainer's.")
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs over which an engine's weights are spread.")
    data_parallel: int = Field(1, ge=1, le=64, description="Engines that share the rows, each in a process of its own.")
    gpu_memory_utilization: float = Field(0.5, gt=0, le=0.98, description="Of a GPU's memory, what an engine may take.")
    kv_cache_gib: int = Field(1, ge=1, description="On a CPU: memory for keys and values.")
    max_rows: int = Field(512, ge=1, le=65536, description="Rows an engine decodes at a time.")
    max_tokens: int = Field(8192, ge=8, description="Tokens of a step: prompts that are read together fit into it.")
    enforce_eager: bool = Field(False, description="No CUDA graphs: a faster start, slower steps. A CPU never has any.")
    adapters: bool = Field(
        False, description="With trainer.lora: the engine gets the adapters alone instead of all merged weights."
    )
    sleep: bool | None = Field(
        None,
        description="The engine gives its GPU's memory back while the trainer works; null: if both are on one GPU.",
    )
    threads: int | None = Field(None, ge=1, description="On a CPU: threads of an engine; null: placement.threads.")
    start_seconds: float = Field(600, gt=0, description="Within which an engine must be ready.")
    generate_seconds: float = Field(
        3600, gt=0, description="An engine that does not answer for so long counts as lost; above the longest rollout."
    )


class ServerConfig(Section):
    """OpenAI-compatible servers, with rollout.engine=server."""

    urls: list[UrlWithoutSecrets] = Field(
        min_length=1, description="Of the servers, e.g. http://host:8000; rows are spread over them."
    )
    kind: Literal["vllm", "sglang"] = Field("vllm", description="What runs there: weights are updated by its routes.")
    weights_folder: str = Field(
        min_length=1, description="A folder that this machine and all servers see: weights go through it."
    )
    model: str | None = Field(None, description="Name of the model at the servers; null: the one that they serve.")
    api_key_variable: str | None = Field(None, description="Environment variable that holds the servers' API key.")
    max_in_flight: int = Field(64, ge=1, le=65536, description="Requests a server has at a time.")
    timeout_seconds: float = Field(600, gt=0, description="Of a request; longer counts as a failure of the server.")
    retries: int = Field(3, ge=0, le=100, description="Further attempts of a request, on whichever server is well.")
    recovery_seconds: float = Field(
        60, ge=0, description="How long to wait for a server to come back when none is left."
    )


class AgentConfig(Section):
    """Rollouts of several turns: the policy calls tools and goes on with what they say."""

    loop: str = Field("tools", description="Name of the agent loop, also a plugin's.")
    loop_options: dict[str, JsonValue] = Field({}, description="Its options, e.g. {opening: <result>}.")
    tools: list[str] = Field(["calculator"], min_length=1, description="Names of tools, also a plugin's.")
    max_turns: int = Field(4, ge=1, le=1000, description="A rollout ends after so many turns of the policy.")
    max_observation_tokens: int = Field(
        64, ge=1, description="What a tool says is cut there. It counts as response: max_new_tokens bounds both."
    )
    concurrency: int = Field(64, ge=1, le=65536, description="Tool calls at a time.")
    tool_timeout_seconds: float = Field(10.0, gt=0, description="A tool that takes longer counts as failed.")
    on_tool_error: Literal["observation", "fail"] = Field(
        "observation",
        description="`observation`: the policy reads what went wrong. `fail`: the rollout ends without a reward.",
    )

    @model_validator(mode="after")
    def _tools_differ(self) -> "AgentConfig":
        doubled = sorted({name for name in self.tools if self.tools.count(name) > 1})
        if doubled:
            raise ValueError(f"tools names {', '.join(doubled)} twice; once is enough")
        return self


class PartialConfig(Section):
    """Rollouts that are not finished when the budget is used up go on in the next iteration, with the new policy."""

    seconds: float | None = Field(None, gt=0, description="Of generation, a shard.")
    tokens: int | None = Field(None, ge=1, description="Of a shard's responses, together.")

    @model_validator(mode="after")
    def _one_is_set(self) -> "PartialConfig":
        if self.seconds is None and self.tokens is None:
            raise ValueError("partial without a budget does nothing; set seconds or tokens, or remove it")
        return self


class SamplerConfig(Section):
    """A curriculum: which prompts an iteration takes."""

    name: str = Field("pass_rate", min_length=1, description="Of a built-in sampler, or of the class in `path`.")
    path: str | None = Field(
        None, min_length=1, description="The user's file (my_sampler.py) or module; null: a sampler that is built in."
    )
    kwargs: dict[str, JsonValue] = Field({}, description="The sampler's options.")


class RolloutConfig(Section):
    """What the policy generates in each iteration."""

    engine: Literal["local", "vllm", "server"] = Field(
        "local",
        description="`local`: Transformers in this process. `vllm`: vLLM on this machine. `server`: vLLM or SGLang.",
    )
    prompts: int = Field(16, ge=1, description="Prompts an iteration.")
    sampler: SamplerConfig | None = Field(None, description="Which prompts; null: all in turn, shuffled each epoch.")
    samples: int = Field(8, ge=1, description="Responses a prompt: the group size.")
    shards: int = Field(1, ge=1, description="Rollout and reward tasks an iteration.")
    max_gen_batches: int = Field(
        10,
        ge=1,
        le=1000,
        description="With algorithm.filters: batches of prompts drawn at most, until `prompts` groups are left.",
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Of sampling; all log-probs are of logits divided by it.")
    top_p: float = Field(1.0, gt=0, le=1, description="Only the most likely tokens that add up to it; 1: all.")
    top_k: int = Field(0, ge=0, description="Only so many of the most likely tokens; 0: all.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Only tokens so likely, relative to the most likely; 0: all.")
    repetition_penalty: float = Field(
        1.0, gt=0, le=10, description="Above 1 makes tokens of prompt and response so far less likely."
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="A response ends with the token that completes one of these texts."
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], description="A response ends with one of them too.")
    max_prompt_tokens: int = Field(64, ge=1, description="Longer prompts are treated as `long_prompts` says.")
    long_prompts: Literal["refuse", "drop", "truncate_left", "truncate_right"] = Field(
        "refuse", description="Prompts above max_prompt_tokens: the run is refused, or they are left out, or cut."
    )
    max_new_tokens: int = Field(96, ge=1, description="A response is cut there.")
    max_batch_rows: int = Field(1024, ge=1, description="Rows the local engine decodes at a time.")
    vllm: VllmConfig = VllmConfig()
    server: ServerConfig | None = Field(None, description="Needed with engine=server, and only then.")
    agent: AgentConfig | None = Field(None, description="Rollouts of several turns, with tools; null: of one turn.")
    partial: PartialConfig | None = Field(None, description="A budget an iteration; null: every row is finished.")

    @model_validator(mode="after")
    def _shards_fit(self) -> "RolloutConfig":
        if self.shards > self.prompts:
            raise ValueError(f"shards={self.shards} is more than prompts={self.prompts}; a shard is whole groups")
        return self

    @model_validator(mode="after")
    def _engine_fits(self) -> "RolloutConfig":
        if (self.engine == "server") != (self.server is not None):
            have = "is not set" if self.server is None else "is set"
            raise ValueError(f"engine={self.engine}, but server {have}; set engine=server and server.urls, or neither")
        if self.engine == "server" and len(self.stop) > 4:
            raise ValueError(
                f"stop names {len(self.stop)} texts; servers take at most 4: leave some out, or engine=vllm"
            )
        if self.engine != "local" and self.temperature > 2:
            raise ValueError(
                f"temperature={self.temperature:g}: vLLM and SGLang take at most 2; lower it, or engine=local"
            )
        if self.engine != "local" and self.temperature < 0.01:
            raise ValueError(f"temperature={self.temperature:g}: vLLM samples at 0.01 instead; raise it")
        if self.partial is not None and self.stop:
            raise ValueError(
                "partial and stop exclude each other: a text could begin in one iteration and end in the next; use "
                "stop_token_ids, or remove one"
            )
        if not self.vllm.own_process and self.vllm.tensor_parallel > 1:
            raise ValueError(
                f"vllm.tensor_parallel={self.vllm.tensor_parallel} takes GPUs of its own; set own_process=true"
            )
        if self.vllm.data_parallel > 1 and not self.vllm.own_process:
            raise ValueError(
                f"vllm.data_parallel={self.vllm.data_parallel} needs a process for each engine; set own_process=true"
            )
        if self.agent is not None and self.partial is not None:
            raise ValueError("agent and partial exclude each other: a tool's state does not outlive an iteration")
        if self.server is not None and self.server.kind == "sglang" and self.shaped:
            raise ValueError(
                "SGLang reports log-probs of the distribution before top_p, top_k, min_p and repetition_penalty; "
                "leave those at their defaults, or use engine=vllm"
            )
        return self

    @property
    def shaped(self) -> bool:
        """Whether tokens are drawn from another distribution than softmax(logits / temperature)."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1
