"""Retraining: new prompts, a policy that starts from the champion, a comparison, a decision.

    plan        which prompts and which champion, committed before anything is trained
    train       the flow `train`; what it has committed is reused
    judge       champion and challenger on the same held-out prompts
    decide      by the rule, and by a person if that is wanted
    apply       MLflow's aliases follow the decision

It may be killed anywhere and is run again: what is committed is not done twice.
"""

from typing import Annotated, Any, Literal
from uuid import UUID

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from prefect.states import Completed, State
from pydantic import BaseModel, Field

from flows.report import artifact_key
from flows.train import train
from grpo_lib.config_retrain import RetrainConfig
from grpo_lib.errors import ConfigError, NotFoundError
from grpo_lib.patience import Patience
from grpo_lib.retraining.judgement import as_markdown, compare, objections
from grpo_lib.retraining.ledger import Ledger, now_ms, somebody
from grpo_lib.retraining.planning import next_plan, training_config
from grpo_lib.retraining.promotion import abandon as end_round
from grpo_lib.retraining.promotion import conclude, moving_champion
from grpo_lib.retraining.records import Comparison, Decision, Judged, Plan
from grpo_lib.run import Run
from grpo_lib.storage import paths
from grpo_lib.storage.claims import utc_now
from grpo_lib.storage.lease import holding_in_turn
from grpo_lib.storage.manifests import Manifest, latest
from grpo_lib.storage.objects import check_store
from grpo_lib.tracking.address import check_tracking, tracking_uri
from grpo_lib.tracking.mlflow import tracker_for
from grpo_lib.tracking.registry import CHALLENGER, Registered, Registry

HOUR_MS = 3_600_000
STATES = {
    "nothing to do": "NothingToDo",
    "waiting": "AwaitingApproval",
    "promoted": "Promoted",
    "refused": "Refused",
    "superseded": "Superseded",
    "abandoned": "Abandoned",
}
"""Prefect's names of the states in which a retraining ends; all are of the type Completed."""


Reason = Annotated[str, Field(min_length=1)]


class Approval(RunInput):
    """What a person says to a challenger that passes the rule."""

    version: str
    """The challenger that is meant."""
    promote: bool = Field(False, description="Make the challenger the champion; no: it is refused.")
    by: str = Field(min_length=1, description="Who decides.")
    reason: str = Field("", description="Goes into the record.")


class Answer(BaseModel):
    """The same, given to a challenger that waits for it."""

    version: str = Field(description="The challenger, which waits; for another the answer is refused.")
    promote: bool = Field(description="Make it the champion; no: it is refused.")
    reason: str = Field("", description="Goes into the record.")


class RetrainReport(BaseModel):
    """What a retraining says at its end."""

    status: Literal["nothing to do", "waiting", "promoted", "refused", "superseded", "abandoned"]
    model: str
    round: int | None = None
    run: str | None = None
    version: str | None = None
    """The challenger."""
    before: str | None = None
    """The champion that it met."""
    reasons: list[str] = []
    comparison: Comparison | None = None
    mlflow: str | None = None
    record: str | None = None
    """Where the decision lies in the store."""


def flow_run_name() -> str:
    return f"retrain {flow_run.get_parameters()['config'].model}"


@flow(name="retrain", flow_run_name=flow_run_name)
def retrain(config: RetrainConfig, answer: Answer | None = None, abandon: Reason | None = None) -> State[RetrainReport]:
    """Trains the champion on the prompts that came since the last time, and promotes what comes out if it is better.

    Args:
        config: The model, its training, and the rule of promotion.
        answer: With approval=manual: to a challenger that waits for it.
        abandon: Ends the open round for this reason, and trains nothing; its prompts are new again.
    """
    report = run_retraining(config, answer, abandon)
    said = "; ".join(report.reasons) or report.status
    return Completed(name=STATES[report.status], message=f"{report.model}: {said}", data=report)


def run_retraining(config: RetrainConfig, answer: Answer | None, abandon: str | None) -> RetrainReport:
    """One round: an open one, or a new one if there are new prompts.

    Raises:
        ConfigError: the answer is to a version that does not wait for one, or the round is to be abandoned as well.
    """
    if answer is not None and abandon is not None:
        raise ConfigError("`answer` and `abandon` exclude each other; give one")
    ledger, registry = Ledger(config.train.store, config.model), Registry(config.train)
    check_store(ledger.objects)
    tracking = config.train.tracking
    patience = Patience(tracking.patience_seconds, "MLflow", "train.tracking.patience_seconds")
    patience.call(lambda: check_tracking(tracking_uri(config.train)))
    seconds = 3600 * config.wait_hours if config.when_busy == "wait" else 0.0
    with holding_in_turn(ledger.retraining, seconds) as lease:
        with moving_champion(ledger, registry):
            pass  # what a crash left untold is told now
        if abandon is not None:
            return _decided(ledger, end_round(ledger, registry, abandon))
        if answer is not None:
            opened = ledger.open()
            _check_answer(config, answer.version, None if opened is None else opened.judged)
        plan = next_plan(config, ledger, registry)
        if plan is None:
            return RetrainReport(
                status="nothing to do",
                model=config.model,
                reasons=[f"fewer than {config.prompts_needed} new prompts in {', '.join(config.data.train)}"],
            )
        judged = ledger.read(plan.round, Judged, "judged.json") or judge(config, ledger, registry, plan)
        lease.check()
        decision = decide(config, ledger, registry, plan, judged, answer)
    show(plan, judged, decision)
    return _report(ledger, plan, judged, decision)


def judge(config: RetrainConfig, ledger: Ledger, registry: Registry, plan: Plan) -> Judged:
    """Trains, registers what came out as the challenger, and compares it with the policy that it started from."""
    settings = training_config(config, ledger, plan)
    trained = train(
        settings, return_state=True
    )  # when the flow run is retried, Prefect gives the state without a result
    if not trained.is_completed():
        trained.result()  # raises what went wrong
    run = Run(settings)
    manifests = run.manifests()
    (before, after), checkpoint = evaluations(run, manifests), latest(manifests, "checkpoint")[-1]
    tables = [run.stages.table(each.to_ref(reused=True)) for each in (before, after)]
    comparison = compare(
        (before, tables[0]), (after, tables[1]), config.promotion, max_failed=settings.reward.max_failed,
        seed=settings.seed,
    )  # fmt: skip
    free = plan.champion is None and config.first_champion == "always"
    version = register(config, registry, run, checkpoint)
    judged = Judged(
        version=version,
        policy_version=int(str(checkpoint.summary["policy_version"])),
        policy_digest=str(checkpoint.summary["policy_digest"]),
        checkpoint=checkpoint.path,
        comparison=comparison,
        against=[] if free else objections(comparison, config.promotion),
        flow_run=flow_run.get_id() if deployment.get_id() else None,
        mlflow=_mlflow(run),
        at=utc_now(),
        at_ms=now_ms(),
    )
    return ledger.create(plan.round, "judged.json", judged)


def evaluations(run: Run, manifests: list[Manifest]) -> tuple[Manifest, Manifest]:
    """Of the policy that the run started from, and of its last: on the same data.

    Raises:
        NotFoundError: a file that the evaluation reads, such as a reward function, changed between the two.
    """
    found = latest(manifests, "evaluate")
    before, after = found[0], found[-1]
    data = [next(ref.digest for ref in each.inputs if ref.stage == "dataset") for each in (before, after)]
    places = before.iteration, after.iteration
    if data[0] != data[1] or before.external != after.external or places != (0, run.config.iterations):
        raise NotFoundError(
            f"run {run.name!r} has no evaluations of its first and last policy with the same data and reward "
            "functions; put back what was changed meanwhile, or `grpo retrain CONFIG --abandon REASON`"
        )
    return before, after


def register(config: RetrainConfig, registry: Registry, run: Run, checkpoint: Manifest) -> str:
    """Makes a checkpoint a version of the registered model, the challenger; again: finds it."""
    tracker, place = tracker_for(run), run.stages.folder(checkpoint.to_ref(reused=True))
    version, digest = int(str(checkpoint.summary["policy_version"])), str(checkpoint.summary["policy_digest"])
    model_id = tracker.log_model(version=version, digest=digest, uri=place)
    registered = Registered(
        place=place, run=run.name, policy_version=version, policy_digest=digest, run_id=tracker.run_id,
        model_id=model_id,
    )  # fmt: skip
    made = registry.register(config.model, registered)
    registry.set_alias(config.model, CHALLENGER, made)
    tracker.finish("FINISHED")
    return made


def decide(
    config: RetrainConfig, ledger: Ledger, registry: Registry, plan: Plan, judged: Judged, answer: Answer | None
) -> Decision | None:
    """By the rule, then by a person; None: a person has been asked and has not answered yet."""
    passes, by, reasons = not judged.against, "the rule", list(judged.against) or [_gain(judged.comparison)]
    if passes and (config.approval == "manual" or answer is not None):
        said = ask(config, plan, judged, answer)
        if said is None:
            return None
        _check_answer(config, said.version, judged)
        passes, by = said.promote, said.by
        reasons = [*reasons, said.reason] if said.reason else reasons
    outcome: Literal["promoted", "refused"] = "promoted" if passes else "refused"
    return conclude(ledger, registry, plan, judged, outcome, reasons, by=by, rule=config.promotion)


def ask(config: RetrainConfig, plan: Plan, judged: Judged, answer: Answer | None) -> Approval | None:
    """What a person says; None: nobody has yet. A run of a deployment suspends itself and asks in Prefect's pages."""
    left_ms = judged.at_ms + HOUR_MS * config.approval_hours - now_ms()
    if left_ms <= 0:
        reason = f"no approval within approval_hours={config.approval_hours:g}"
        return Approval(version=judged.version, promote=False, by="the deadline", reason=reason)
    if answer is not None:
        return Approval(version=answer.version, promote=answer.promote, by=somebody(), reason=answer.reason)
    own = judged.flow_run is not None and judged.flow_run == flow_run.get_id()
    if own or (deployment.get_id() and not _asks(judged.flow_run)):
        form = Approval.with_initial_data(description=_page(plan, judged, None), version=judged.version)
        seconds = max(1, int(left_ms / 1000))
        show(plan, judged, None)
        return suspend_flow_run(wait_for_input=form, timeout=seconds, key=f"round-{plan.round}")  # ends the process
    return None


def _check_answer(config: RetrainConfig, version: str, judged: Judged | None) -> None:
    waits = None if judged is None else judged.version
    if version != waits:
        other = "none does" if waits is None else f"version {waits} does: `grpo retrain CONFIG --yes {waits}` or --no"
        raise ConfigError(
            f"the answer is to version {version} of model {config.model!r}, which does not wait for one; {other}"
        )


def _asks(other: str | None) -> bool:
    """Whether another flow run has asked a person and goes on with the answer."""
    if other is None:
        return False
    with get_client(sync_client=True) as client:
        try:
            state = client.read_flow_run(UUID(other)).state
        except ObjectNotFound:  # deleted, or of another server
            return False
    return state is not None and not state.is_final()


def show(plan: Plan, judged: Judged, decision: Decision | None) -> None:
    """The comparison on the flow run's page in Prefect."""
    create_markdown_artifact(
        key=artifact_key(plan.model, "retraining"),
        markdown=_page(plan, judged, decision),
        description=f"Round {plan.round} of {plan.model}",
    )


def _page(plan: Plan, judged: Judged, decision: Decision | None) -> str:
    state = "waits for a decision" if decision is None else f"{decision.outcome} by {decision.by}, {decision.at}"
    champion = "none yet: compared with the start" if plan.champion is None else f"version {plan.champion.version}"
    reasons = judged.against or [_gain(judged.comparison)] if decision is None else decision.reasons
    lines = [
        f"# {plan.model}, round {plan.round}: {state}",
        "",
        *(f"- {each}" for each in reasons),
        f"- challenger: version {judged.version}, policy {judged.policy_version} of run `{plan.run}`",
        f"- champion: {champion}",
        f"- new prompts: {plan.new.prompts} in {len(plan.files)} files"
        + (f", and {plan.replay.prompts} of earlier rounds" if plan.replay else ""),
        f"- MLflow: {judged.mlflow}",
        "",
        as_markdown(judged.comparison),
    ]
    return "\n".join(lines)


def _gain(comparison: Comparison) -> str:
    row = comparison.all
    return f"gain {row.gain:+.4f} on {row.prompts} prompts, p={row.p_better:.4f}"


def _mlflow(run: Run) -> str:
    tracker = tracker_for(run)
    return tracker.page() or f"`mlflow ui --backend-store-uri {tracker.uri}`, run {run.name}"


def _report(ledger: Ledger, plan: Plan, judged: Judged, decision: Decision | None) -> RetrainReport:
    reasons = judged.against or [_gain(judged.comparison)]
    common: dict[str, Any] = {
        "model": plan.model,
        "round": plan.round,
        "run": plan.run,
        "version": judged.version,
        "comparison": judged.comparison,
        "mlflow": judged.mlflow,
    }
    if decision is None:
        before = None if plan.champion is None else plan.champion.version
        return RetrainReport(status="waiting", before=before, reasons=reasons, **common)
    return _decided(ledger, decision, **common)


def _decided(ledger: Ledger, decision: Decision, **common: Any) -> RetrainReport:
    assert decision.outcome != "rolled back"
    return RetrainReport(
        status=decision.outcome,
        before=decision.before,
        reasons=decision.reasons,
        record=ledger.objects.location(paths.round_file(decision.model, decision.round, "decision.json")),
        **({"model": decision.model, "round": decision.round, "version": decision.version} | common),
    )
