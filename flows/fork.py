"""Where a branch goes on from another run: the policy there, in copies that the branch's settings can start from."""

from flows.batches import hand_over
from grpo_lib.errors import NotFoundError
from grpo_lib.plugins import load_plugins
from grpo_lib.run import Run
from grpo_lib.storage.manifests import Manifest, latest
from tasks.update import checkpoint


def go_on_from_base(run: Run) -> None:
    """Of a branch: makes sure that the policy of the fork is saved, with the settings that it was made with.

    A branch may train in another way. So its trainer restores that policy and replays no update of its base; where
    engines get weights as artifacts, they get those of the policies that still generate.

    Raises:
        NotFoundError: the base has not come so far.
    """
    branch = run.config.branch
    if branch is None:
        return
    for owner in run.lineage:
        load_plugins(owner.config.algorithm.plugins)
    made = branch.iteration if branch.shares("update", branch.iteration) else branch.iteration - 1
    if made < 0:
        return
    ahead = run.config.pipeline.max_staleness
    for k in range(max(0, made - ahead), made + 1):
        hand_over(run, policy_made_in(run, k).to_ref(reused=True))
    checkpoint(run, made, policy_made_in(run, made).to_ref(reused=True))


def policy_made_in(run: Run, iteration: int) -> Manifest:
    """The base's update of an iteration that ``run`` shares."""
    owner = run.at("update", iteration)
    found = latest(owner.manifests(iteration), "update")
    if not found:
        raise NotFoundError(
            f"run {owner.name!r} has no update of iteration {iteration}, which branch {run.name!r} goes on from; "
            f"`grpo resume {owner.name}` makes it"
        )
    return found[-1]
