"""What the next retraining takes, written down before it begins; what was written down and not decided goes on."""

from collections.abc import Sequence
from typing import Any

from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.config_retrain import RetrainConfig
from grpo_lib.errors import ConfigError
from grpo_lib.placement.code_version import code_digest
from grpo_lib.preflight import check_continuation, check_surroundings
from grpo_lib.retraining.arrivals import Arrived, arrived, heldout_lines, replayed, snapshot
from grpo_lib.retraining.ledger import Ledger, now_ms, somebody
from grpo_lib.retraining.promotion import moving_champion
from grpo_lib.retraining.records import Champion, Plan, Snapshot
from grpo_lib.run import differences
from grpo_lib.start import checkpoint_of
from grpo_lib.storage.claims import utc_now
from grpo_lib.storage.lease import check_lease
from grpo_lib.tracking.registry import CHAMPION, Registry


def next_plan(config: RetrainConfig, ledger: Ledger, registry: Registry) -> Plan | None:
    """The plan of the open round, or of a new one; None: there is nothing to do.

    A new one is written only when its training passed the checks of its surroundings: files that can't be used leave
    no round behind. They may take long, so that they hold nobody up: when the champion was moved meanwhile, it is
    planned again.

    Raises:
        ConfigError: the open round began with other settings.
        GrpoError: what `check_surroundings` says.
    """
    before = ledger.open()
    if before is not None:
        assert before.plan is not None
        _check_unchanged(config, before.plan)
        return before.plan
    new = arrived(config.data, ledger.taken())
    if sum(each.file.prompts for each in new) < config.prompts_needed:
        return None
    plan = _plan(config, ledger, registry, new)
    training = training_config(config, ledger, plan)
    check_surroundings(training)
    check_continuation(training)
    with moving_champion(ledger, registry):
        if (plan.round, plan.champion) == (ledger.next_number(), champion_of(config, registry)):
            check_lease(ledger.alias)
            return ledger.create(plan.round, "plan.json", plan)
    return next_plan(config, ledger, registry)


def _plan(config: RetrainConfig, ledger: Ledger, registry: Registry, new: Sequence[Arrived]) -> Plan:
    number, champion = ledger.next_number(), champion_of(config, registry)
    learned = ledger.learned(None if champion is None else champion.version)
    old = replayed(ledger, learned, config.replay, config.train.seed, number)
    plan = Plan(
        model=config.model,
        round=number,
        run=f"{config.model}-{number:06d}",
        champion=champion,
        files=[each.file for each in new],
        new=snapshot(ledger, number, "prompts", [line for each in new for line in each.lines]),
        replay=snapshot(ledger, number, "replay", old) if old else None,
        heldout=snapshot(ledger, number, "heldout", heldout_lines(config.data)),
        config={},
        rules=_rules(config),
        by=somebody(),
        at=utc_now(),
        at_ms=now_ms(),
        code=code_digest(),
    )
    return plan.model_copy(update={"config": training_config(config, ledger, plan).model_dump(mode="json")})


def champion_of(config: RetrainConfig, registry: Registry) -> Champion | None:
    """The version in use; None: there is none yet.

    Raises:
        NotFoundError: its checkpoint is not in the store, or MLflow does not say which it is.
    """
    version = registry.aliases(config.model).get(CHAMPION)
    if version is None:
        return None
    found = registry.version(config.model, version)
    checkpoint = checkpoint_of(config.train.store, found.run, found.policy_version, found.policy_digest)
    return Champion(
        version=version,
        run=found.run,
        policy_version=found.policy_version,
        policy_digest=found.policy_digest,
        checkpoint=checkpoint.path,
    )


def training_config(config: RetrainConfig, ledger: Ledger, plan: Plan) -> RunConfig:
    """Of the round's training run: its data lies in the store, and it starts from the champion."""

    def place(stored: Snapshot) -> str:
        return ledger.objects.location(stored.path)

    values: dict[str, Any] = config.train.model_dump(mode="json")
    values["name"] = plan.run
    train = [plan.new] if plan.replay is None else [plan.new, plan.replay]
    values["data"] |= {"train": [place(each) for each in train], "heldout": [place(plan.heldout)]}
    values["data"]["endpoint_url"] = config.train.store.endpoint_url
    if plan.champion is not None:
        values["model"]["start"] = {"run": plan.champion.run, "version": plan.champion.policy_version}
    return make_config(values, origin=f"round {plan.round} of model {plan.model}")


def _rules(config: RetrainConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", include={"promotion", "first_champion", "approval", "approval_hours"})


def _check_unchanged(config: RetrainConfig, plan: Plan) -> None:
    changed = differences(
        make_config(dict(plan.config)), training_config(config, Ledger(config.train.store, plan.model), plan)
    )
    rules = _rules(config)
    changed += [f"{name}: {old} -> {rules[name]}" for name, old in plan.rules.items() if old != rules[name]]
    if changed:
        raise ConfigError(
            f"round {plan.round} of model {plan.model!r} began with other settings ({'; '.join(changed)}); let it go "
            "on with those, or end it with `grpo retrain CONFIG --abandon REASON`: its files are then new again"
        )
