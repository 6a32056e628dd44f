"""The simulation of scale: hand-computed times, what must hold whatever the numbers, and fits that find constants."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.scale.check import BETWEEN, MeasuredRun, errors, fit, leave_one_out
from tests.benchmarks.scale.hardware import DECODE_POINTS, GPUS, Efficiency, Gpu, Host, ObjectStore
from tests.benchmarks.scale.iteration import Placement, System, handover_seconds, simulate
from tests.benchmarks.scale.model import MODELS, Model
from tests.benchmarks.scale.published import compare, read, steps, typical_ratio
from tests.benchmarks.scale.rollout import Engine, interrupted_seconds, rollout_seconds
from tests.benchmarks.scale.scenarios import make_system
from tests.benchmarks.scale.split import best_split, placements
from tests.benchmarks.scale.training import Trainer
from tests.benchmarks.scale.workload import Workload, truncated_workload_mean

IDEAL = Efficiency(matmul=1, bandwidth=1, link=1, memory=1, training_memory=1, step_seconds=0, all_reduce_seconds=0)
PLAIN = Gpu(
    name="plain", flops=1e6, memory=1e6, bandwidth=1e3, link=1e3, network=1e2, per_machine=8, source="round numbers"
)
SMALL = Model(name="small", layers=1, hidden=10, heads=1, kv_heads=1, head_dim=10, mlp=20, vocabulary=50)
"""1,000 parameters in the layer (4 x 100 + 3 x 200), 500 in the head and in the embedding; 40 bytes a token."""
WORK = Workload(prompts=16, samples=8, prompt_tokens=100, mean_tokens=500, max_tokens=2000, optimizer_steps=2)


def test_a_models_size_is_that_of_its_card() -> None:
    billions = {name: model.parameters / 1e9 for name, model in MODELS.items()}
    cards = {"qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.61, "llama-8b": 8.03, "qwen3-32b": 32.8, "llama-70b": 70.6}
    assert billions == pytest.approx(cards, rel=0.003)
    assert MODELS["llama-8b"].kv_bytes() == 128 * 1024  # 32 layers x 8 heads x 128 x keys and values x 2 bytes


def test_a_decoding_step_reads_the_weights_once_and_each_rows_cache() -> None:
    engine = Engine(model=SMALL, gpu=PLAIN, efficiency=IDEAL, tensor_parallel=1)
    assert (SMALL.body, SMALL.head, SMALL.parameters, SMALL.weight_bytes) == (1000, 500, 2000, 3000)
    assert engine.fixed_seconds(rows=1) == pytest.approx(3.0)  # 3,000 bytes at 1,000 a second
    assert engine.fixed_seconds(rows=2000) == pytest.approx(6.0)  # 2,000 rows x 3,000 operations at 10^6 a second
    assert engine.token_seconds == pytest.approx(0.040)
    # Two rows of 3 and 5 tokens after prompts of 10: 3 steps at contexts 20, 22, 24, then 2 at 13, 14.
    expected = 5 * 3.0 + 0.040 * (20 + 22 + 24 + 13 + 14)
    assert engine.decode_seconds(10, np.array([3, 5])) == pytest.approx(expected)


def test_rows_wait_for_room_in_the_cache() -> None:
    room_for_one = replace(PLAIN, memory=2 * SMALL.parameters + 40.0 * 20)
    engine = Engine(model=SMALL, gpu=room_for_one, efficiency=IDEAL, tensor_parallel=1)
    assert engine.cache_tokens == 20
    alone = engine.decode_seconds(10, np.array([10]))
    assert engine.decode_seconds(10, np.array([10, 10])) == pytest.approx(2 * alone)
    assert engine.decode_seconds(11, np.array([10])) == float("inf")


def test_interrupted_rollouts_do_not_wait_for_the_longest_row() -> None:
    engine = Engine(model=SMALL, gpu=replace(PLAIN, flops=1e12, memory=1e9), efficiency=IDEAL, tensor_parallel=1)
    same = replace(WORK, prompt_tokens=0, mean_tokens=1000.0, spread=1e-6)
    # 128 rows of 1,000 tokens at a time, half of their context read on average, whether or not they are interrupted.
    expected = 1000 * (3.0 + 128 * 500 * 0.040)
    assert interrupted_seconds(engine, same, 1, 0) == pytest.approx(expected, rel=1e-3)
    assert rollout_seconds(engine, same, 1) == pytest.approx(expected, rel=2e-3)
    spread = replace(same, spread=0.8)
    assert interrupted_seconds(engine, spread, 1, 1) < rollout_seconds(engine, spread, 1)


def test_an_update_is_operations_over_those_of_all_gpus() -> None:
    alone = Trainer(model=SMALL, gpu=PLAIN, efficiency=IDEAL, gpus=1, recompute=False)
    work = Workload(prompts=4, samples=1, prompt_tokens=10, mean_tokens=5.0, max_tokens=6, spread=1e-6)
    # 4 rows of 10 + 5 tokens: 2 x 1,000 x 60 in the layer, 2 x 500 x 20 in the head, 2 x 10 x 15^2 x 4 in attention.
    forward = 120_000 + 20_000 + 18_000
    assert SMALL.forward_flops(10, np.array([5, 5, 5, 5])) == forward
    adam = 28 * 2000 / 1e3
    assert alone.update_seconds(work) == pytest.approx(3 * forward / 1e6 + adam)
    assert replace(alone, recompute=True).update_seconds(work) == pytest.approx(4 * forward / 1e6 + adam)
    assert alone.logprob_seconds(work) == pytest.approx(forward / 1e6)


def test_gathering_weights_takes_over_where_links_are_slow() -> None:
    two = Trainer(model=SMALL, gpu=PLAIN, efficiency=IDEAL, gpus=2)
    slow = replace(two, gpu=replace(PLAIN, link=1e-3))  # of 4,000 bytes in half each GPU lacks half
    micro_batches = -(-int(WORK.tokens / 2) // two.max_tokens)
    assert slow.logprob_seconds(WORK) == pytest.approx(micro_batches * 2 * 2000 / 2 / 1e-3)


def test_weights_are_hashed_written_and_moved_byte_by_byte() -> None:
    host = Host(hash_rate=100, digest_rate=400, write_rate=50, pcie=200)
    store = ObjectStore(latency=1, rate=10, commit_requests=5)
    system = System(model=SMALL, gpu=PLAIN, workload=WORK, host=host, store=store)
    given_, taken = handover_seconds(system, False, 16)
    # 8,000 bytes in float32 to the host, with digest; 4,000 in half with digest, written, hashed, uploaded; 5 requests.
    assert given_ == pytest.approx(40 + 20 + 10 + 80 + 40 + 400 + 5)
    assert taken == pytest.approx(5 + 400 + 40 + 20)
    twice = replace(system, host=replace(host, streams=2))
    assert handover_seconds(twice, False, 16)[0] == pytest.approx(40 + (20 + 10 + 80 + 40) / 2 + 400 + 5)


def test_the_two_published_decoding_latencies_come_out() -> None:
    for point in DECODE_POINTS:
        engine = Engine(
            model=MODELS[point.model],
            gpu=GPUS[point.gpu],
            efficiency=Efficiency(),
            tensor_parallel=point.tensor_parallel,
        )
        seconds = engine.decode_seconds(point.prompt_tokens, np.full(point.rows, point.new_tokens))
        assert seconds == pytest.approx(point.seconds, rel=0.01)


@given(mean=st.floats(50, 1500), spread=st.floats(0.1, 1.5), rows=st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_lengths_have_the_mean_and_the_longest_row(mean: float, spread: float, rows: int) -> None:
    work = replace(WORK, prompts=512, mean_tokens=mean, spread=spread)
    everything = work.lengths(work.rows)
    assert everything.mean() == pytest.approx(mean, rel=0.01, abs=0.6)
    assert everything.max() <= work.max_tokens and work.lengths(rows)[-1] == everything[-1]


def test_a_fraction_of_truncated_rows_gives_a_mean() -> None:
    mean = truncated_workload_mean(2000, 0.05, 0.8)
    lengths = replace(WORK, prompts=512, mean_tokens=mean).lengths(4096)
    assert (lengths == 2000).mean() == pytest.approx(0.05, abs=0.002)


@given(
    mean=st.sampled_from((200, 500, 1000)),
    factor=st.floats(1.1, 1.8),
    train=st.integers(1, 7),
    staleness=st.sampled_from((0, 1)),
)
@settings(max_examples=25, deadline=None)
def test_longer_responses_take_longer(mean: float, factor: float, train: int, staleness: int) -> None:
    placement = Placement(rollout_gpus=8, train_gpus=train, tensor_parallel=1, max_staleness=staleness)
    system = System(model=MODELS["qwen2.5-1.5b"], gpu=GPUS["H100"], workload=WORK)
    longer = replace(system, workload=replace(WORK, mean_tokens=mean * factor))
    shorter = replace(system, workload=replace(WORK, mean_tokens=mean))
    assert simulate(shorter, placement).seconds < simulate(longer, placement).seconds


@given(gpus=st.integers(1, 130), staleness=st.sampled_from((0, 1)), limit=st.sampled_from((None, 8)))
@settings(max_examples=50, deadline=None)
def test_a_split_covers_all_gpus(gpus: int, staleness: int, limit: int | None) -> None:
    system = System(model=MODELS["llama-8b"], gpu=GPUS["H100"], workload=WORK, max_train_gpus=limit)
    for each in placements(system, gpus, staleness):
        assert each.gpus == gpus and each.rollout_gpus % each.tensor_parallel == 0
        assert each.train_gpus >= 1 and (limit is None or each.train_gpus <= limit)
        assert not (each.colocated and staleness)


@pytest.mark.parametrize("model", ["llama-8b", "llama-70b"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_twice_the_gpus_are_never_slower(model: str, staleness: int) -> None:
    """With the same batch, up to the cost of more workflow tasks; where the trainer may not grow, this need not hold:
    8 GPUs do both in turn, 16 hand the weights over through the store."""
    system = make_system(model, "parallel")
    system = replace(system, workload=replace(system.workload, prompts=64))
    found = [best_split(system, gpus, staleness) for gpus in (8, 16, 32, 64, 128)]
    seconds = [each.iteration.seconds for each in found if each is not None]
    assert len(seconds) >= 3 and all(after <= 1.01 * before for before, after in pairwise(seconds))


def test_overlap_hides_the_shorter_half() -> None:
    placement = Placement(rollout_gpus=8, train_gpus=8, tensor_parallel=1)
    system = System(model=MODELS["llama-8b"], gpu=GPUS["H100"], workload=WORK)
    apart, ahead = simulate(system, placement), simulate(system, replace(placement, max_staleness=1))
    assert apart.seconds == pytest.approx(sum(apart.stages.values()))
    assert max(apart.seconds / 2, max(apart.stages.values())) <= ahead.seconds < apart.seconds


def test_what_does_not_fit_has_no_split() -> None:
    assert best_split(make_system("llama-70b", "today"), 64, 1) is None  # 1.1 TB of state on one machine
    assert best_split(make_system("llama-70b", "parallel"), 16, 0) is None


def test_every_published_figure_names_its_source_and_is_simulated_without_a_constant_of_its_own() -> None:
    data = read()
    assert all(each["source"] in data["sources"] for each in data["figures"])
    assert all(each["url"].startswith("https://") and each["date"] for each in data["sources"].values())
    found = steps(compare(Efficiency()))
    mean, spread = typical_ratio(found)
    assert 0.7 < mean < 1.4 and spread < 1.5  # what docs/benchmarks.md says of it, roughly
    assert all(each.assumed for each in found)


@dataclass(frozen=True, kw_only=True)
class Done:
    """A manifest, as far as the check reads it."""

    stage: str
    iteration: int | None
    rows: int
    tokens: int
    seconds: float
    created_ms: int
    summary: Mapping[str, object] = field(default_factory=dict)


TRUE = {"rollout": (0.05, 2e-3, 4e-9, 1e-10), "update": (0.01, 1e-4, 2e-10), "reward": (0.002, 3e-5)}


def made_run(name: str, hidden: int, rows: int, length: int, noise: float = 0.0) -> MeasuredRun:
    """A run of a machine whose constants are known."""
    model = replace(SMALL, name=name, hidden=hidden, mlp=2 * hidden)
    random = np.random.default_rng(rows + hidden)
    empty = MeasuredRun(name=name, model=model, prompt_tokens=10, group=8, batch_rows=64, manifests=[])
    manifests: list[Done] = []
    clock = 0.0
    for k in range(8):
        for stage, costs in TRUE.items():
            tokens = rows * (length + k) if stage != "reward" else 0
            done = Done(
                stage=stage,
                iteration=k,
                rows=rows if stage != "update" else 1,
                tokens=tokens,
                seconds=0,
                created_ms=0,
                summary={
                    "length_max": 2.0 * length,
                    "trained_rows": float(rows - k),
                    "model_tokens": (rows - k) * (length + k + 10 / 8),
                },
            )
            amounts = empty.amounts(stage, done)
            names = {
                "rollout": ("stage", "step", "flop", "byte"),
                "update": ("stage", "row", "flop"),
                "reward": ("stage", "row"),
            }
            seconds = sum(cost * amounts[term] for cost, term in zip(costs, names[stage], strict=True))
            seconds *= 1 + noise * random.standard_normal()
            clock += seconds
            manifests.append(replace(done, seconds=seconds, created_ms=round(1000 * clock)))
        clock += 0.1
    return replace(empty, manifests=manifests)


RUNS = [(16, 32, 20), (16, 128, 40), (32, 64, 30), (64, 32, 60), (64, 256, 20), (24, 96, 50)]


def test_an_update_is_of_the_rows_that_were_trained_and_of_a_prompt_once_for_its_group() -> None:
    run = made_run("run", 10, 16, 20)
    summary = {"trained_rows": 8.0, "model_tokens": 16 * 20 + 2 * 10.0}  # two steps of a group of 8
    update = Done(stage="update", iteration=0, rows=2, tokens=999, seconds=0, created_ms=0, summary=summary)
    amounts = run.amounts("update", update)
    assert amounts["row"] == 16
    model = run.model
    attention = 2 * 10 * 30**2 * 16  # on whole rows
    assert amounts["flop"] == 3 * (2 * model.body * (16 * 20 + 2 * 10) + 2 * model.head * 16 * 20 + attention)


def test_a_fit_finds_the_constants_of_a_made_up_machine() -> None:
    runs = [made_run(f"run-{place}", *sizes) for place, sizes in enumerate(RUNS)]
    machine = fit([each for run in runs for each in run.samples()])
    assert list(machine.costs["update"].values()) == pytest.approx(TRUE["update"], rel=0.02)
    assert list(machine.costs["reward"].values()) == pytest.approx(TRUE["reward"], rel=0.02)
    assert machine.costs[BETWEEN]["stage"] == pytest.approx(0.1, rel=0.02)
    assert all(abs(each.relative) < 0.02 for each in leave_one_out(runs))


def test_errors_of_runs_left_out_are_about_the_noise() -> None:
    runs = [made_run(f"run-{place}", *sizes, noise=0.05) for place, sizes in enumerate(RUNS)]
    samples = [each for run in runs[:-1] for each in run.samples()]
    found = {each.stage: each.relative for each in errors(fit(samples), runs[-1].samples())}
    assert set(found) == {"rollout", "reward", "update", BETWEEN, "iteration"}
    assert abs(found["iteration"]) < 0.1
