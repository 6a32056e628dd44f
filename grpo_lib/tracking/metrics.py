"""Every metric name, in one place, and how an iteration's manifests become metric points.

A name is ``<stage>/<what>``, so that MLflow groups them. A point's time is that of the commit it describes, so that
publishing again gives the same points and doubles none.
"""

import re
from collections.abc import Iterable, Sequence

import pyarrow as pa

from grpo_lib.data.schemas import METRICS
from grpo_lib.storage.stages import Manifest

DESCRIPTIONS = {
    "rollout/length_mean": "Mean response length in tokens.",
    "rollout/length_max": "Longest response in tokens.",
    "rollout/truncated_fraction": "Responses cut at rollout.max_new_tokens.",
    "rollout/surprise": "Mean of -log p of the sampled tokens, in nats: an estimate of the entropy.",
    "rollout/turns_mean": "Turns of the policy in a rollout (with rollout.agent, as the next ones).",
    "rollout/tool_calls_mean": "Calls of tools in a rollout.",
    "rollout/tool_errors_fraction": "Calls that raised or took too long.",
    "rollout/observation_fraction": "Response tokens that tools said: read, never trained on.",
    "rollout/failed_fraction": "Rollouts that failed: null reward, in no statistic.",
    "rollout/parity_mean": "Mean absolute difference between the engine's and the trainer's log-probs.",
    "rollout/parity_max": "Largest absolute difference between the engine's and the trainer's log-probs.",
    "reward/mean": "Mean reward of the rollouts that could be scored.",
    "reward/min": "Smallest reward.",
    "reward/max": "Largest reward.",
    "reward/failed_fraction": "Rewards that could not be computed (null, in no statistic).",
    "reward/correct_mean": "Fraction of right answers among the rollouts.",
    "reward/format_mean": "Fraction of rollouts in the right format.",
    "old_logprobs/entropy": "Mean entropy of the policy before the update, in nats.",
    "old_logprobs/rollout_kl": "Mean of rollout_logprobs - old_logprobs: KL(engine || trainer), estimator k1.",
    "old_logprobs/rollout_abs_difference_max": "Largest difference between engine and trainer on one token.",
    "advantage/abs_mean": "Mean absolute advantage of a row.",
    "advantage/min": "Smallest advantage.",
    "advantage/max": "Largest advantage.",
    "advantage/rows_without_signal_fraction": "Rows in groups whose rewards are all equal: advantage 0.",
    "advantage/rows_without_reward": "Rows taken out because their reward is null.",
    "advantage/staleness_mean": "Policy versions between the rollouts and the update, mean.",
    "advantage/staleness_max": "Policy versions between the rollouts and the update, most.",
    "advantage/overlong_penalty_mean": "Mean of what length adds to the reward (0 or less).",
    "advantage/kl_in_reward": "KL to the reference before its coefficient, mean per token, where it is in the reward.",
    "advantage/kl_coef": "Coefficient of the KL in the reward.",
    "advantage/next_kl_coef": "Coefficient of the next iteration, by the controller.",
    "advantage/metric/<name>": "A number that algorithm.metrics names.",
    "advantage/mismatch/nonfinite_tokens": "Tokens dropped because a log-prob is infinite.",
    "advantage/mismatch/kl": "Mean of rollout_logprobs - old_logprobs, before rejection as the next ones.",
    "advantage/mismatch/k3_kl": "The same KL by estimator k3.",
    "advantage/mismatch/chi2_token": "Mean squared token ratio of old to rollout policy, minus 1.",
    "advantage/mismatch/chi2_seq": "Mean squared row ratio, minus 1.",
    "advantage/mismatch/rollout_ppl": "Mean perplexity of rows under the engine.",
    "advantage/mismatch/old_ppl": "Mean perplexity of rows under the trainer.",
    "advantage/mismatch/log_ppl_ratio": "Mean of log(old perplexity / rollout perplexity) of rows.",
    "advantage/mismatch/log_ppl_ratio_abs": "Mean of its absolute value.",
    "advantage/mismatch/log_ppl_ratio_min": "Its smallest.",
    "advantage/mismatch/log_ppl_ratio_max": "Its largest.",
    "advantage/mismatch/above_fraction": "Token (sequence weights: row) ratios above the upper bound.",
    "advantage/mismatch/below_fraction": "Ratios below the lower bound (not set: 1 over the upper).",
    "advantage/mismatch/masked_token_fraction": "Tokens that the correction rejected.",
    "advantage/mismatch/masked_row_fraction": "Rows of which nothing is left.",
    "advantage/mismatch/weight_mean": "Importance weights of what is left (without weights: its token ratios), mean.",
    "advantage/mismatch/weight_std": "Their standard deviation.",
    "advantage/mismatch/weight_min": "Their smallest.",
    "advantage/mismatch/weight_max": "Their largest.",
    "advantage/mismatch/effective_sample_size": "1 / mean((w / mean w)^2): 1 when all weigh the same.",
    "advantage/mismatch/<rule>_rejected_rows": "Rows that a rule of the correction touched.",
    "filter/prompts_kept": "Prompts with a row left after the filters, before surplus ones are cut.",
    "filter/prompts_drawn": "Prompts that responses were generated to.",
    "filter/rows_used_fraction": "Rows that belong to the iteration.",
    "filter/full": "1 when enough prompts are left.",
    "filter/batches": "Batches of prompts drawn.",
    "dataset/train_long_prompts": "Training prompts above rollout.max_prompt_tokens, left out or cut.",
    "dataset/heldout_long_prompts": "Held-out prompts above rollout.max_prompt_tokens, left out or cut.",
    "prompts/effective_fraction": "With rollout.sampler: of how many prompts it chooses, (sum w)^2 / (n sum w^2).",
    "prompts/carried": "Prompts whose responses go on from the iteration before.",
    "rollout/unfinished_fraction": "Responses that go on in the next iteration.",
    "rollout/older_tokens_fraction": "Response tokens that an earlier policy drew.",
    "filter/next_prompt": "Prompts drawn so far in the run.",
    "filter/waiting_fraction": "Rows of prompts with a response that goes on in the next iteration.",
    "greedy_rollout/length_mean": "Mean length of the greedy responses (baseline of remax).",
    "greedy_rollout/length_max": "Longest greedy response.",
    "greedy_rollout/truncated_fraction": "Greedy responses cut at the limit.",
    "greedy_rollout/surprise": "Mean of -log p of the greedy tokens.",
    "greedy_rollout/turns_mean": "Turns of the policy in a greedy rollout (with rollout.agent, as the next ones).",
    "greedy_rollout/tool_calls_mean": "Calls of tools in a greedy rollout.",
    "greedy_rollout/tool_errors_fraction": "Of those, calls that raised or took too long.",
    "greedy_rollout/observation_fraction": "Tokens of the greedy responses that tools said.",
    "greedy_rollout/failed_fraction": "Greedy rollouts that failed.",
    "greedy_reward/mean": "Mean reward of the greedy responses.",
    "greedy_reward/min": "Smallest.",
    "greedy_reward/max": "Largest.",
    "greedy_reward/failed_fraction": "Greedy responses that could not be scored.",
    "greedy_reward/<component>_mean": "Mean of a named part of their reward.",
    "update/loss": "The loss, with KL and entropy terms.",
    "update/entropy": "Mean entropy of the policy in the update, over the trained rows.",
    "update/approx_kl": "Mean of old_logprobs - logprobs over the trained rows.",
    "update/kl": "KL penalty against the reference before its coefficient.",
    "update/ratio": "Mean probability ratio of the new to the old policy.",
    "update/ratio_min": "Smallest probability ratio.",
    "update/ratio_max": "Largest probability ratio.",
    "update/clip_fraction_high": "Tokens whose gradient was cut above the clip range (or by the dual clip).",
    "update/clip_fraction_low": "Tokens whose gradient was cut below the clip range.",
    "update/grad_norm": "Gradient norm before clipping.",
    "update/lr": "Learning rate of the last optimizer step.",
    "update/skipped": "Optimizer steps skipped for a non-finite gradient.",
    "update/is_weight": "Mean importance weight of the trained tokens.",
    "update/rejected_fraction": "Tokens that the correction rejected in bypass mode.",
    "update/value": "Mean value of the critic.",
    "update/value_loss": "The critic's loss.",
    "update/value_error": "Mean squared difference of value and return.",
    "update/critic_skipped": "Critic steps skipped for a non-finite gradient.",
    "update/critic_grad_norm": "The critic's gradient norm before clipping.",
    "update/trained_rows": "Rows an optimizer step that can change the gradient.",
    "update/padded_fraction": "Padding among the tokens of the micro-batches.",
    "update/stopped_early": "1 when trainer.max_kl ended the iteration early.",
    "update/model_tokens": "Tokens that went through the policy and back, prompts once in a packed micro-batch.",
    "update/model_tflop": "Operations that this needs, in 10^12; recomputation not counted.",
    "update/tokens_per_second": "Of those tokens, over all ranks.",
    "update/peak_memory_gib": "Most memory of a rank so far: of the device, or of its process on a CPU.",
    "update/model_flops_utilization": "Of the devices' peak, where that is known (placement.peak_tflops).",
    "update/optimizer_step": "Optimizer steps so far.",
    "update/policy_version": "Version of the new policy.",
    "reference/policy_version": "Version of the policy that the reference was brought up to.",
    "checkpoint/policy_version": "Version of the saved policy.",
    "evaluate/policy_version": "Version of the evaluated policy.",
    "seconds/<stage>": "Seconds of the stage's body; shards add up.",
    "rollout/tokens_per_second": "Response tokens a second of the rollout stage.",
    "system/<name>": "Of the flow's machine (tracking.system_seconds), from MLflow; the step counts samples.",
    "evaluate/<mode>_accuracy": "Fraction of right held-out answers (sampled: mean@n).",
    "evaluate/<mode>_accuracy_se": "Its standard error over prompts.",
    "evaluate/<mode>_reward_mean": "Mean held-out reward.",
    "evaluate/<mode>_length_mean": "Mean held-out response length in tokens.",
    "evaluate/<mode>_truncated_fraction": "Held-out responses cut at the limit.",
    "evaluate/<mode>_failed_fraction": "Held-out responses whose reward could not be computed.",
    "evaluate/pass_at_<k>": "Unbiased pass@k of the sampled held-out responses.",
    "evaluate/maj_at_<k>": "Whether the commonest of k sampled held-out answers is right.",
    "warm_start/parameters": "Parameters of the model.",
    "warm_start/first_loss": "Loss of the first step.",
    "warm_start/last_loss": "Loss of the last step.",
    "warm_start/left_out": "Demonstrations longer than warm_start.max_tokens.",
    "warm_start/policy_version": "0.",
    "pretrained/parameters": "Parameters of the model.",
    "pretrained/policy_version": "0.",
    "reward/<component>_mean": "Mean of a named part of the reward.",
}
"""What each metric is. ``<stage>``, ``<mode>``, ``<k>``, ``<component>`` stand for a name; evaluation per data source
has the source after ``evaluate/``."""

_PATTERNS = [
    re.compile(re.sub(r"<\w+>", r"[\\w.-]+", name).replace("evaluate/", r"evaluate/(?:[\w.-]+/)?") + "$")
    for name in DESCRIPTIONS
]


def is_described(name: str) -> bool:
    """Whether a metric name has a description."""
    return any(pattern.match(name) for pattern in _PATTERNS)


def metric_points(manifests: Sequence[Manifest]) -> pa.Table:
    """The metrics of some artifacts; those of a stage's shards are joined, their seconds add up."""
    points = []
    for stage in sorted({manifest.stage for manifest in manifests}):
        shards = [manifest for manifest in manifests if manifest.stage == stage]
        iteration, time = shards[0].iteration or 0, max(shard.created_ms for shard in shards)
        values = {f"{stage}/{name}": value for name, value in _of_shards(shards).items()}
        seconds = sum(shard.seconds for shard in shards)
        values[f"seconds/{stage}"] = seconds
        if stage == "rollout" and seconds > 0:
            values["rollout/tokens_per_second"] = sum(shard.tokens for shard in shards) / seconds
        points += [
            {"name": name, "value": value, "iteration": iteration, "timestamp_ms": time}
            for name, value in sorted(values.items())
        ]
    return pa.Table.from_pylist(points, schema=METRICS)


def _of_shards(shards: Sequence[Manifest]) -> dict[str, float]:
    names = sorted({name for shard in shards for name, value in shard.summary.items() if _is_number(value)})
    return {name: _joined(name, shards) for name in names}


def _joined(name: str, shards: Iterable[Manifest]) -> float:
    """Extremes stay extremes; means are weighted by the rows that they are of."""
    values = [(float(str(shard.summary[name])), _weight(name, shard)) for shard in shards if name in shard.summary]
    if name in ("min", "max") or name.endswith(("_min", "_max")):
        return (max if name.endswith("max") else min)(value for value, _ in values)
    rows = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / rows if rows else values[0][0]


def _weight(name: str, shard: Manifest) -> float:
    failed = shard.summary.get("failed_fraction", 0.0) if shard.stage.endswith("reward") else 0.0
    scored = 1.0 if name == "failed_fraction" else 1.0 - float(str(failed))
    return max(1, shard.rows) * scored


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
