"""The Arrow schema of every dataset that a stage commits.

A stage adds columns and never copies those of another: rows of the stages of one iteration join by position, and
``rollout_id`` proves it. Token ids from the engine are the truth; text is for people and rewards.
"""

import pyarrow as pa

TOKENS = pa.list_(pa.int32())
FLOATS = pa.list_(pa.float32())
MASK = pa.list_(pa.uint8())

DATASET = pa.schema(
    {
        "prompt_id": pa.string(),
        "split": pa.string(),  # train | heldout
        "prompt": pa.string(),  # as the problem wrote it
        "prompt_ids": TOKENS,  # as the policy reads it: chat template applied
        "reference": pa.string(),
        "data_source": pa.string(),
        "demonstration": pa.string(),  # a response to learn from, where the data set brings one
        "metadata": pa.string(),  # JSON: further columns of the data set
    }
)

PROMPTS = pa.schema(
    {
        "prompt_id": pa.string(),
        "dataset_row": pa.int64(),  # row in the dataset's split
        "epoch": pa.int32(),  # null: a sampler chose it
        "prompt": pa.string(),
        "prompt_ids": TOKENS,
        "reference": pa.string(),
        "data_source": pa.string(),
        "metadata": pa.string(),
    }
)

# Columns of the prompts of an iteration that goes on with unfinished rollouts.
PROMPT_EXTRAS = pa.schema({"carried_from": pa.int32()})  # row in the prompts of the iteration before; null: fresh

ROLLOUTS = pa.schema(
    {
        "rollout_id": pa.string(),  # iteration-prompt-sample
        "prompt_row": pa.int32(),  # row in the iteration's prompts
        "group_id": pa.int64(),
        "response_ids": TOKENS,
        "response_mask": MASK,  # 1: produced by the policy
        "rollout_logprobs": FLOATS,  # of the sampling distribution
        "finish_reason": pa.string(),  # stop | length | max_turns | failed | unfinished
        "seed": pa.int64(),
        "temperature": pa.float32(),
        "policy_version": pa.int32(),
        "staleness": pa.int32(),  # versions between it and the policy that learns from the row
        "weights_digest": pa.string(),  # of what the engine held
        "text": pa.string(),
    }
)
# Columns that the rollouts of an agent have.
ROLLOUT_EXTRAS = pa.schema(
    {
        "turns": pa.int32(),  # of the policy
        "tool_calls": pa.int32(),
        "tool_errors": pa.int32(),  # calls that raised or took too long
        "failure": pa.string(),  # why there is no reward; null: nothing failed
    }
)
# Columns of rollouts that may go on in the next iteration.
PARTIAL_EXTRAS = pa.schema(
    {
        "token_versions": pa.list_(pa.int32()),  # of the policy that drew each token
        "failure": pa.string(),
    }
)

REWARDS = pa.schema(
    {
        "rollout_id": pa.string(),
        "value": pa.float64(),  # null: could not be computed
        "reason": pa.string(),  # why it is null
        "components": pa.map_(pa.string(), pa.float64()),
    }
)

# Columns of rewards whose functions give them.
REWARD_EXTRAS = pa.schema(
    {
        "token_scores": FLOATS,  # of each response token, NaN where it has none; they count beside the value
        "verdicts": pa.list_(
            pa.struct(
                {
                    "name": pa.string(),  # of the function
                    "function": pa.string(),  # digest of its source and options
                    "sample": pa.string(),  # digest of what it saw
                    "value": pa.float64(),
                    "reason": pa.string(),  # why there is no value
                    "text": pa.string(),  # a word to people
                    "result": pa.string(),  # JSON of all it said
                }
            )
        ),
    }
)

OLD_LOGPROBS = pa.schema({"rollout_id": pa.string(), "old_logprobs": FLOATS, "entropy": FLOATS})
# sum_v pi_old(v)^2 of each token, where the estimator wants it.
SUM_SQUARED_PROBS = pa.field("sum_squared_probs", FLOATS)

REF_LOGPROBS = pa.schema({"rollout_id": pa.string(), "ref_logprobs": FLOATS})

SELECTION = pa.schema(
    {
        "rollout_id": pa.string(),
        "used": pa.bool_(),  # belongs to the iteration: its group, the statistics, the scoring
        "copies": pa.int32(),  # how often the row takes part in the update
        "reason": pa.string(),  # what took it out
    }
)

VALUES = pa.schema({"rollout_id": pa.string(), "values": FLOATS})

ADVANTAGES = pa.schema(
    {
        "rollout_id": pa.string(),
        "advantages": FLOATS,
        "response_mask": MASK,  # after rows without a reward, and what the rollout correction rejects, were taken out
    }
)
# Columns that the advantages have where the algorithm makes them.
ADVANTAGE_EXTRAS = pa.schema({"returns": FLOATS, "is_weights": FLOATS, "copies": pa.int32()})

UPDATES = pa.schema(
    {
        "optimizer_step": pa.int64(),
        "epoch": pa.int32(),
        "rows": pa.int32(),
        "tokens": pa.int64(),
        "metric": pa.map_(pa.string(), pa.float64()),
    }
)

EVALUATION = pa.schema(
    {
        "prompt_id": pa.string(),
        "data_source": pa.string(),
        "mode": pa.string(),  # greedy | sampled
        "sample": pa.int32(),
        "prompt": pa.string(),
        "text": pa.string(),
        "reference": pa.string(),
        "response_ids": TOKENS,
        "finish_reason": pa.string(),
        "value": pa.float64(),
        "correct": pa.bool_(),
        "answer": pa.string(),  # in one spelling: equal answers vote together
        "reason": pa.string(),
    }
)

METRICS = pa.schema({"name": pa.string(), "value": pa.float64(), "iteration": pa.int32(), "timestamp_ms": pa.int64()})
