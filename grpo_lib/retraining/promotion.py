"""Decisions, and what they do to MLflow's registered model: aliases, tags, notes.

A decision is committed in the store first; then MLflow is told, which may be repeated. What a crash left untold is told
before anything else is decided.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from grpo_lib.config_retrain import PromotionConfig
from grpo_lib.errors import ConfigError, NotFoundError, RunError
from grpo_lib.retraining.judgement import as_markdown
from grpo_lib.retraining.ledger import Ledger, Round, now_ms, somebody
from grpo_lib.retraining.records import Decision, Judged, Outcome, Plan
from grpo_lib.start import checkpoint_of
from grpo_lib.storage import paths
from grpo_lib.storage.claims import utc_now
from grpo_lib.storage.lease import check_lease, holding_in_turn
from grpo_lib.tracking.registry import CHALLENGER, CHAMPION, Registry

BEFORE = "grpo.champion.before"
"""Tag of a promoted version: the champion that it took the place of."""
ALIAS_SECONDS = 120.0
"""So long one who moves the champion waits for another who does."""


@contextmanager
def moving_champion(ledger: Ledger, registry: Registry) -> Iterator[None]:
    """One at a time; earlier decisions are told first."""
    with holding_in_turn(ledger.alias, ALIAS_SECONDS):
        for each in ledger.unapplied():
            _apply(ledger, registry, each)
        yield


def conclude(
    ledger: Ledger,
    registry: Registry,
    plan: Plan,
    judged: Judged | None,
    outcome: Outcome,
    reasons: Sequence[str],
    *,
    by: str,
    rule: PromotionConfig | None,
) -> Decision:
    """Decides a round. A promotion becomes ``superseded`` when the champion is not the one that it started from.

    Raises:
        RunError: it was decided otherwise meanwhile.
    """
    with moving_champion(ledger, registry):
        current = registry.aliases(plan.model).get(CHAMPION)
        expected = None if plan.champion is None else plan.champion.version
        if outcome == "promoted" and current != expected:
            outcome = "superseded"
            reasons = [f"the champion is now version {current}, the challenger started from {expected}", *reasons]
        decision = Decision(
            model=plan.model,
            round=plan.round,
            outcome=outcome,
            version=None if judged is None else judged.version,
            before=current,
            reasons=list(reasons),
            rule=None if rule is None else rule.model_dump(mode="json"),
            by=by,
            at=utc_now(),
            at_ms=now_ms(),
        )
        return _commit(ledger, registry, decision)


def abandon(ledger: Ledger, registry: Registry, reason: str) -> Decision:
    """Ends the open round; who calls it holds ``ledger.retraining``.

    Raises:
        ConfigError: there is none.
    """
    found = ledger.open()
    if found is None or found.plan is None:
        raise ConfigError(f"model {ledger.model!r} has no open round; there is nothing to abandon")
    return conclude(ledger, registry, found.plan, found.judged, "abandoned", [reason], by=somebody(), rule=None)


def roll_back(ledger: Ledger, registry: Registry, version: str | None, reason: str) -> Decision:
    """Makes an earlier version the champion; it takes part in no round, and waits for none.

    Args:
        version: None: the one whose place the champion took.

    Raises:
        NotFoundError: there is no champion, no such version, none before it, or its checkpoint is gone.
        ConfigError: it is the champion already.
    """
    model = ledger.model
    with moving_champion(ledger, registry):
        tags, current = registry.tags(model), registry.aliases(model).get(CHAMPION)
        if current is None:
            known = f"it has versions {', '.join(tags)}" if tags else "it has no versions"
            raise NotFoundError(f"model {model!r} has no champion to roll back; {known}")
        target = version or tags[current].get(BEFORE)
        if target is None:
            raise NotFoundError(
                f"version {current} of model {model!r} took no champion's place; name one with --to: {', '.join(tags)}"
            )
        if target not in tags:
            raise NotFoundError(f"model {model!r} has no version {target}; it has {', '.join(tags)}")
        if target == current:
            raise ConfigError(f"version {target} is the champion of model {model!r} already; name another with --to")
        found = registry.version(model, target)
        checkpoint_of(ledger.store, found.run, found.policy_version, found.policy_digest)
        decision = Decision(
            model=model,
            round=ledger.next_number(),
            outcome="rolled back",
            version=target,
            before=current,
            reasons=[reason] if reason else [],
            rule=None,
            by=somebody(),
            at=utc_now(),
            at_ms=now_ms(),
        )
        return _commit(ledger, registry, decision)


def _commit(ledger: Ledger, registry: Registry, decision: Decision) -> Decision:
    """Writes it down, then tells MLflow."""
    check_lease(ledger.alias)
    found = ledger.create(decision.round, "decision.json", decision)
    if (found.outcome, found.version) != (decision.outcome, decision.version):
        raise RunError(
            f"round {found.round} of model {found.model!r} was decided meanwhile by {found.by}: {found.outcome}, "
            f"version {found.version}; that stays (`grpo models {found.model}` shows it)"
        )
    for each in ledger.unapplied():
        _apply(ledger, registry, each)
    return found


def _apply(ledger: Ledger, registry: Registry, decided: Round) -> None:
    """Tells MLflow; to be repeated until it is marked as done."""
    decision = decided.decision
    assert decision is not None
    check_lease(ledger.alias)  # who was paused here does not move it back
    model, version = decision.model, decision.version
    record = ledger.objects.location(paths.round_file(model, decision.round, "decision.json"))
    if decision.outcome == "rolled back":
        assert version is not None
        assert decision.before is not None
        registry.set_alias(model, CHAMPION, version)
        registry.tag(model, decision.before, _tags(decision) | {"grpo.record": record})
    elif version is not None:
        if decision.outcome == "promoted":
            if decision.before is not None:
                registry.tag(model, version, {BEFORE: decision.before})
            registry.set_alias(model, CHAMPION, version)
        registry.remove_alias(model, CHALLENGER, version)
        registry.tag(model, version, _tags(decision) | {"grpo.record": record})
        registry.describe(model, version, _note(decided, record))
    ledger.mark_applied(decision.round, somebody(), utc_now())


def _tags(decision: Decision) -> dict[str, str]:
    return {
        "grpo.decision": decision.outcome,
        "grpo.decision.reasons": "; ".join(decision.reasons),
        "grpo.decision.by": decision.by,
        "grpo.decision.at": decision.at,
        "grpo.decision.round": str(decision.round),
    }


def _note(decided: Round, record: str) -> str:
    """What a version's page says."""
    decision, judged, plan = decided.decision, decided.judged, decided.plan
    assert decision is not None
    lines = [f"**{decision.outcome}** in round {decision.round} by {decision.by}, {decision.at}", ""]
    lines += [f"- {each}" for each in decision.reasons]
    if plan is not None and judged is not None:
        lines += [f"- policy {judged.policy_version} of run `{plan.run}`", f"- record: `{record}`", ""]
        lines.append(as_markdown(judged.comparison))
    return "\n".join(lines)
