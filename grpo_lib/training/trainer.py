"""The trainer: optimizer steps and scoring, the same code for every backend and any number of ranks.

Networks stay in evaluation mode in updates as well: dropout would make the ratio of a policy to itself differ from 1.
Nothing here draws from a global random state, so weights, optimizer moments and the step are the whole state.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from grpo_lib.data.ragged import Ragged
from grpo_lib.errors import AlgorithmError, NonFiniteError
from grpo_lib.seeds import derive_seed
from grpo_lib.training.base import Batching, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.critic import Critic
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.flops import FlopCounter
from grpo_lib.training.learner import Learner
from grpo_lib.training.logprobs import Head, TokenScores
from grpo_lib.training.lora import Adapter
from grpo_lib.training.loss_terms import Totals, critic_backward, micro_batch_loss
from grpo_lib.training.microbatches import Layout, MicroBatch, Sequences, micro_batch, plan_sequences
from grpo_lib.training.minibatches import make_mini_batch, mini_batches, rows_with_gradient
from grpo_lib.training.reference import Reference
from grpo_lib.training.scoring import Progress, check_finite, score_tokens
from grpo_lib.training.world import World


class Trainer:
    """A policy with its optimizer, perhaps a critic and a reference. Each rank calls each method in the same order.

    Args:
        policy: learner of a `PolicyModule`.
        model: the Transformers model in it.
        flops: of that model; None: not known.
        adapter: what LoRA put into it.
        lr_factor: what ``lr`` is multiplied by at an optimizer step (from 0).
        max_tokens: of a micro-batch when scoring.
        reference: for the exact KL and for ``ref_logprobs``.
    """

    def __init__(
        self,
        policy: Learner,
        *,
        model: Any,
        flops: FlopCounter | None,
        adapter: Adapter | None = None,
        lr: float,
        lr_factor: Callable[[int], float],
        max_tokens: int,
        layout: Layout,
        world: World,
        critic: Critic | None = None,
        reference: Reference | None = None,
    ) -> None:
        self.policy = policy
        self.model = model
        self.adapter = adapter
        self.critic = critic
        self.reference = reference
        self.world = world
        self.layout = layout
        self.optimizer_step = 0
        self._lr = lr
        self._lr_factor = lr_factor
        self._flops = flops
        self._score = partial(score_tokens, world=world, max_tokens=max_tokens, layout=layout)

    def load_policy(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], optimizer_step: int) -> None:
        """Sets the policy's state: the weights given, by the names of the model's parameters; all moments; the step."""
        self.policy.load({f"model.{name}": each for name, each in weights.items()}, moments)
        self.optimizer_step = optimizer_step

    def weights(self, adapter: bool = False) -> dict[str, Tensor]:
        """The policy's weights as those of a plain Transformers model, adapters merged, float32; rank 0's only.

        Args:
            adapter: the adapters alone, by the names that they have in peft's files.
        """
        named = {name.removeprefix("model."): each for name, each in self.policy.weights().items()}
        if self.adapter is None or not named:
            return named
        return self.adapter.alone(named) if adapter else self.adapter.merged(named)

    def digest(self) -> str:
        """Digest of the policy's weights; rank 0's only."""
        weights = self.weights()
        return weights_digest(weights) if weights else ""

    def critic_digest(self) -> str | None:
        """Digest of the critic's weights, rank 0's only; None without a critic."""
        if self.critic is None:
            return None
        weights = self.critic.learner.weights()
        return weights_digest(weights) if weights else ""

    def logprobs(
        self, sequences: Sequences, temperature: float, on_progress: Progress | None = None
    ) -> tuple[Ragged, Ragged]:
        """Log-probs and entropies of the response tokens under the current policy, without gradient."""
        logprobs, entropy = self._score(
            lambda batch: self.policy.module(batch, temperature)[:2], sequences, on_progress=on_progress
        )
        check_finite(logprobs)
        return logprobs, entropy

    def sum_squared_probs(self, sequences: Sequences, temperature: float) -> Ragged:
        """``sum_v pi(v)^2`` at each response token, without gradient."""
        (squares,) = self._score(lambda batch: (self.policy.module(batch, temperature, squares=True)[4],), sequences)
        return squares

    def ref_logprobs(self, sequences: Sequences, temperature: float, on_progress: Progress | None = None) -> Ragged:
        """Log-probs of the response tokens under the reference."""
        reference = self.reference
        assert reference is not None, "this trainer has no reference"
        with reference.switched():
            (logprobs,) = self._score(
                lambda batch: (reference.module(batch, temperature)[0],), sequences, on_progress=on_progress
            )
        check_finite(logprobs)
        return logprobs

    def values(self, sequences: Sequences, on_progress: Progress | None = None) -> Ragged:
        """The critic's value before each response token, without gradient."""
        critic = self.critic
        assert critic is not None, "this trainer has no critic"
        (values,) = self._score(lambda batch: (critic.learner.module(batch),), sequences, on_progress=on_progress)
        return values

    def update(
        self,
        batch: UpdateBatch,
        objective: Objective,
        batching: Batching,
        on_progress: Progress | None = None,
    ) -> list[StepMetrics]:
        """Runs the optimizer steps of one iteration. After an error the state is undefined: restore it."""
        if not batching.train_policy:
            objective = replace(objective, select=None)  # no need to score tokens to choose among them
        steps: list[StepMetrics] = []
        skipped = done = tokens = 0
        planned = [
            (epoch, rows)
            for epoch in range(batching.epochs)
            for rows in mini_batches(batch.mask, batch.group_ids, batching, epoch)
        ]
        for epoch, rows in planned:
            part = batch.gather(rows)
            values = self._step(part, objective, batching, epoch)
            skipped += int(values.get("skipped", 0.0) + values.get("critic_skipped", 0.0))
            if skipped > batching.max_skipped:
                raise NonFiniteError(
                    f"{skipped} gradients of one iteration were NaN or infinite "
                    f"(trainer.max_skipped={batching.max_skipped}); lower trainer.optimizer.lr and go back to a "
                    "checkpoint, or look at the iteration's rollouts"
                )
            count = int(part.mask.values.sum())
            steps.append(
                StepMetrics(
                    optimizer_step=self.optimizer_step, epoch=epoch, rows=len(rows), tokens=count, values=values
                )
            )
            done, tokens = done + 1, tokens + count
            if on_progress is not None:
                on_progress(done, len(planned), tokens)
            if values.get("stopped_early"):
                break
        return steps

    def _step(self, batch: UpdateBatch, objective: Objective, batching: Batching, epoch: int) -> dict[str, float]:
        """One optimizer step on a mini-batch."""
        seed = derive_seed(batching.seed, "select", epoch)
        part = make_mini_batch(batch, objective, seed, lambda: self.logprobs(batch.sequences, objective.temperature)[0])
        totals = Totals()
        exact = batching.train_policy and objective.kl is not None and objective.kl.estimator is None
        with self.reference.head() if exact and self.reference is not None else nullcontext() as ref_head:
            for micro in self._micro_batches(batch, objective, batching, totals):
                if batching.train_policy:
                    scored = self._scored(micro, objective, ref_head)
                    self.policy.backward(micro_batch_loss(part, micro, scored, objective, totals))
                if self.critic is not None:
                    critic_backward(part, micro, self.critic, totals)
        totals.reduce(self.world)
        if totals.nothing_left:
            raise AlgorithmError(
                f"rollout correction in bypass mode: every token that could change the policy (optimizer step "
                f"{self.optimizer_step + 1}) is rejected; loosen algorithm.rollout_correction, lower "
                "trainer.optimizer.lr, or make fewer updates an iteration"
            )
        metrics = totals.metrics()
        if batching.train_policy and batching.max_kl is not None:
            stop = metrics.get("approx_kl", 0.0) > batching.max_kl
            metrics["stopped_early"] = float(stop)
            if stop:
                self._discard()
                return metrics
        if self.critic is not None:
            norm = self.critic.step()
            metrics |= {"critic_grad_norm": norm, "critic_skipped": float(not math.isfinite(norm))}
        return metrics | self._policy_step() if batching.train_policy else metrics

    def _discard(self) -> None:
        self.policy.discard()
        if self.critic is not None:
            self.critic.learner.discard()

    def _micro_batches(self, batch: UpdateBatch, objective: Objective, batching: Batching, totals: Totals) -> Any:
        """This rank's micro-batches; at least one, if only an empty one, so that all ranks step together."""
        active = rows_with_gradient(batch, objective, self.critic is not None)
        planned = plan_sequences(batch.sequences, batching.max_tokens, self.layout, self.world.size, active)
        for rows in planned[self.world.rank] or [active[:0]]:
            micro = micro_batch(batch.sequences, rows, self.layout).to(self.world.device)
            totals.add_micro_batch(micro)
            if batching.train_policy:
                totals.add_share("model_tokens", micro.tokens)
                if self._flops is not None:
                    flop = self._flops.count(micro.tokens, micro.squares, len(micro.targets))
                    totals.add_share("model_tflop", flop / 1e12)
            yield micro

    def _scored(self, micro: MicroBatch, objective: Objective, ref_head: Head | None) -> TokenScores:
        """With gradient; with the exact KL if the head of a reference is given."""
        reference = None
        if ref_head is not None:
            assert self.reference is not None
            reference = (self.reference.hidden(micro, objective.temperature), ref_head)
        found: tuple[Tensor, ...] = self.policy.module(micro, objective.temperature, reference)
        logprobs, entropy, kl, ref_logprobs, _ = found
        return TokenScores(logprobs=logprobs, entropy=entropy, kl=kl, ref_logprobs=ref_logprobs)

    def _policy_step(self) -> dict[str, float]:
        lr = self._lr * self._lr_factor(self.optimizer_step)
        norm = self.policy.step(lr)
        finite = math.isfinite(norm)
        self.optimizer_step += int(finite)
        return {"grad_norm": norm, "lr": lr, "skipped": float(not finite)}
