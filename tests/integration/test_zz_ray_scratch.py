from tests.integration.test_ray import *  # noqa
from tests.integration.test_ray import where, place, accident
import pytest
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

def test_branch(where, place):
    from flows.branches import plan_rerun
    from grpo_lib.run import load_run
    made = place()
    flow = train(made)
    finish(flow, made)
    base = made.run()
    before = {each.path: each.manifest_sha256 for each in base.stages.manifests()}
    rerun = plan_rerun(base.config.store, "chaos", 2, "rollout", ["rollout.top_k=20", "algorithm.old_logprobs=bypass", "trainer.optimizer.lr=2e-3"], "br")
    values = rerun.branch.config.model_dump(mode="json") | {"store": made.store}
    flow = FlowProcess("train", values, made.log)
    finish(flow, made)
    branch = load_run(base.config.store, "br")
    found = branch.stages.manifests()
    own = {(e.stage, e.iteration, e.shard): e.digest for e in found if e.stage != "publish"}
    print(sorted((e.stage, e.iteration) for e in found if e.adopted_from is None and e.stage != "publish"))
    assert {each.path: each.manifest_sha256 for each in base.stages.manifests()} == before
    # the same, in one process, elsewhere
    from flows.debug import debug
    for stage, shard in (("rollout", 1), ("update", 0), ("advantage", 0)):
        done = debug(branch, 3, stage, shard, compare=True)
        print(stage, [e for e in done.comparisons if not e.equal])
        assert done.equal
    done = debug(base, 1, "update", compare=True); assert done.equal
