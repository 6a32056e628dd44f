import threading
import time
from itertools import pairwise

import pytest
import torch

from grpo_lib.config import SmallModelConfig
from grpo_lib.config_rollout import ServerConfig
from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.errors import ConfigError, ModelError, ParityError, ServerLostError
from grpo_lib.generation.base import LENGTH, STOP, UNFINISHED, Budget, Request, Sampling
from grpo_lib.generation.local import LocalEngine
from grpo_lib.generation.server import ServerEngine
from grpo_lib.models import make_small_model, make_tokenizer
from grpo_lib.progress import Silent, show_progress_on
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.tensors import load_tensors
from tests.unit.generation.fake_servers import FakeSglang, FakeVllm

EOS = 1
TOKENIZER = make_tokenizer([], "0123456789abcdefghijk")
SHAPE = SmallModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_size=32, initializer_range=0.3)
PROMPTS = [[5, 6, 7, 8, 9], [3], [4, 4], [10, 11, 12, 13, 14, 15, 16]]
SAMPLING = Sampling(temperature=0.7, max_new_tokens=10)
KINDS = {"vllm": FakeVllm, "sglang": FakeSglang}


@pytest.fixture(autouse=True)
def _quick(one_thread, monkeypatch):
    for module in ("server_peers", "server_batch"):
        monkeypatch.setattr(f"grpo_lib.generation.{module}.POLL_SECONDS", 0.05)
    monkeypatch.setattr("grpo_lib.generation.server_batch.TICK_SECONDS", 0.02)


def make_model(seed=0):
    return make_small_model(SHAPE, len(TOKENIZER), eos_id=EOS, pad_id=0, max_positions=256, seed=seed)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return folder


@pytest.fixture
def start():
    """Starts fake servers that hold a model which is not the policy."""
    started = []

    def start(kind="vllm", seed=7, **options):
        server = KINDS[kind](make_model(seed), TOKENIZER, **options)
        started.append(server)
        return server

    yield start
    for server in started:
        server.gate.set()
        server.kill()


@pytest.fixture
def connect(model_folder, tmp_path):
    """Makes an engine on servers, with a policy loaded."""
    engines = []

    def connect(*servers, load=True, dtype=torch.float32, tokenizer=TOKENIZER, **settings):
        kind = "sglang" if isinstance(servers[0], FakeSglang) else "vllm"
        options = {"recovery_seconds": 0.5, "timeout_seconds": 20} | settings
        config = ServerConfig(
            urls=[server.url for server in servers], kind=kind, weights_folder=str(tmp_path / "shared"), **options
        )
        engine = ServerEngine(config, model_folder=model_folder, eos_token_ids=[EOS], dtype=dtype, tokenizer=tokenizer)
        engines.append(engine)
        if load:
            engine.load(make_model(0).state_dict())
        return engine

    yield connect
    for engine in engines:
        engine.close()


def ragged(prompts):
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
    return Ragged(values=ids, offsets=lengths_to_offsets(lengths))


def request(n=4, sampling=SAMPLING, prompts=PROMPTS, seed=2**62, **options):
    seeds = torch.arange(len(prompts) * n) * 977 + seed
    return Request(prompts=ragged(prompts), seeds=seeds, n=n, sampling=sampling, **options)


def local_rows(asked, seeds=None, seed=0):
    """What the policy generates without servers."""
    engine = LocalEngine(make_model(seed), eos_token_ids=[EOS], tokenizer=TOKENIZER)
    seeds = asked.seeds if seeds is None else seeds
    return engine.generate(
        Request(prompts=asked.prompts, seeds=seeds, n=asked.n, sampling=asked.sampling, limits=asked.limits)
    )


def rows_of(made):
    values = made.responses.values
    return [values[start:end].tolist() for start, end in pairwise(made.responses.offsets.tolist())]


def assert_same(made, expected):
    assert rows_of(made) == rows_of(expected)
    assert made.finish.tolist() == expected.finish.tolist()
    torch.testing.assert_close(made.logprobs, expected.logprobs, atol=1e-5, rtol=0)


def test_rows_of_vllm_are_those_of_the_local_engine_with_the_same_seeds(start, connect):
    asked = request()
    made, expected = connect(start()).generate(asked), local_rows(asked)
    assert {STOP, LENGTH} == set(made.finish.tolist())
    assert_same(made, expected)
    assert made.responses.values.dtype == torch.int32 and made.logprobs.dtype == torch.float32
    assert made.finish.dtype == torch.uint8


def test_rows_of_sglang_are_those_of_the_local_engine_with_seeds_of_31_bits(start, connect):
    asked = request()
    folded = (asked.seeds ^ (asked.seeds >> 32)) & 0x7FFFFFFF
    assert_same(connect(start("sglang")).generate(asked), local_rows(asked, folded))


def test_all_sampling_settings_arrive(start, connect):
    shaped = Sampling(temperature=0.9, max_new_tokens=12, top_p=0.9, top_k=7, min_p=0.05, repetition_penalty=1.2)
    asked = request(sampling=shaped)
    assert_same(connect(start()).generate(asked), local_rows(asked))


def test_greedy_rows_and_their_logprobs_are_those_of_the_local_engine(start, connect):
    asked = request(n=1, sampling=Sampling(temperature=0, max_new_tokens=12))
    assert_same(connect(start()).generate(asked), local_rows(asked))


def test_each_row_has_its_own_limit(start, connect):
    asked = request(n=2, limits=torch.arange(1, 9))
    made = connect(start()).generate(asked)
    assert_same(made, local_rows(asked))
    assert bool((made.responses.lengths <= torch.arange(1, 9)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_stop_tokens_and_stop_strings_end_rows_and_stay_in_them(start, connect, kind):
    doubles = tuple(2 * character for character in "0123456789bcdefghijk")
    sampling = Sampling(temperature=1.0, max_new_tokens=20, stop=("a", *doubles), stop_token_ids=(5, 6))
    made = connect(start(kind)).generate(request(n=16, sampling=sampling))
    endings = set()
    for ids, finish in zip(rows_of(made), made.finish.tolist(), strict=True):
        texts = [TOKENIZER.decode(ids[: at + 1]) for at in range(len(ids))]
        ends = [
            token in (EOS, 5, 6) or any(stop in text for stop in sampling.stop)
            for token, text in zip(ids, texts, strict=True)
        ]
        assert not any(ends[:-1]) and ends[-1] == (finish == STOP)
        endings.add(next((stop for stop in ("a", doubles) if texts[-1].endswith(stop)), ids[-1]))
    assert {"a", doubles, EOS, 5, 6} <= endings


def test_a_token_that_ends_a_row_at_its_limit_ends_it_by_itself_also_with_sglang(start, connect):
    asked = request(n=32, sampling=Sampling(temperature=1.0, max_new_tokens=2))
    made = connect(start("sglang")).generate(asked)
    ends = [ids[-1] == EOS for ids in rows_of(made)]
    assert any(ends) and [finish == STOP for finish in made.finish.tolist()] == ends
    assert any(end and len(ids) == 2 for end, ids in zip(ends, rows_of(made), strict=True))


def test_stop_strings_need_a_tokenizer(start, connect):
    engine = connect(start(), tokenizer=None)
    with pytest.raises(ConfigError, match="need a tokenizer"):
        engine.generate(request(sampling=Sampling(temperature=1.0, max_new_tokens=4, stop=("a",))))


def test_two_servers_share_the_rows(start, connect):
    servers = [start(), start()]
    for server in servers:
        server.delay = 0.02
    asked = request(n=8)
    made = connect(*servers, max_in_flight=4).generate(asked)
    assert_same(made, local_rows(asked))
    assert sum(len(server.asked) for server in servers) == 32
    assert all(10 <= len(server.asked) <= 22 for server in servers)


def test_no_server_has_more_requests_at_a_time_than_it_may(start, connect):
    servers = [start(), start()]
    for server in servers:
        server.delay = 0.02
    connect(*servers, max_in_flight=3).generate(request(n=8))
    assert [server.peak for server in servers] == [3, 3]


def test_a_server_that_dies_loses_only_its_unfinished_rows(start, connect):
    dying, other = start(), start()
    dying.delay = other.delay = 0.02
    dying.dies_after = 5
    asked = request(n=8)
    made = connect(dying, other, max_in_flight=4).generate(asked)
    assert_same(made, local_rows(asked))
    seeds = [each["seed"] for each in dying.asked + other.asked]
    assert set(seeds) == set(asked.seeds.tolist())
    assert dying.answered >= 5 and dying.answered + other.answered == 32
    assert 1 <= len(seeds) - 32 <= 4  # asked for again: what it had when it died


def test_a_torn_answer_of_the_5xx_kind_is_asked_for_again(start, connect):
    server = start()
    server.failures = [(503, {"error": {"message": "overloaded"}}), (429, None)]
    asked = request(n=2)
    assert_same(connect(server).generate(asked), local_rows(asked))
    assert len(server.asked) == 8 + 2


def test_a_row_that_the_server_gave_up_is_asked_for_again(start, connect):
    vllm, sglang = start("vllm"), start("sglang")
    aborted = {"token_ids": [4], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "abort"}
    vllm.failures = [(200, {"choices": [aborted]})]
    sglang.failures = [(200, {"meta_info": {"finish_reason": {"type": "abort", "message": "Aborted"}}})]
    for server in (vllm, sglang):
        connect(server).generate(request(n=1))
        assert len(server.asked) == 4 + 1


def test_a_row_that_fails_everywhere_is_asked_for_no_more_often_than_allowed(start, connect):
    server = start()
    engine = connect(server, retries=2)
    server.failures = [(500, {"error": {"message": "CUDA error"}})] * 10
    with pytest.raises(ServerLostError, match=rf"asked for 3 times.*retries=2.*{server.url}.*CUDA error"):
        engine.generate(request(n=1, prompts=PROMPTS[:1]))
    assert len(server.asked) == 3


def test_what_a_server_refuses_is_an_error_at_once_with_its_message(start, connect):
    server = start()
    engine = connect(server)
    server.failures = [(400, {"error": {"message": "max_tokens=20 exceeds max_model_len=16"}})]
    with pytest.raises(ConfigError, match=rf"{server.url} refuses.*400: max_tokens=20 exceeds max_model_len=16"):
        engine.generate(request(n=1, prompts=PROMPTS[:1]))
    assert len(server.asked) == 1


def test_a_server_that_is_too_slow_loses_its_rows_to_another(start, connect):
    slow, other = start(), start()
    engine = connect(slow, other, timeout_seconds=0.6)
    slow.gate.clear()
    asked = request(n=2)
    assert_same(engine.generate(asked), local_rows(asked))
    assert len(other.asked) == 8


def test_a_server_that_is_too_slow_every_time_is_an_error_that_says_so(start, connect):
    server = start()
    engine = connect(server, timeout_seconds=0.2, retries=1)
    server.gate.clear()
    with pytest.raises(ServerLostError, match=r"not answered within 0.2 s.*timeout_seconds"):
        engine.generate(request(n=1))


@pytest.mark.parametrize("first_answer", [None, (503, None)], ids=["at once", "after an error"])
def test_a_machine_that_falls_silent_loses_its_rows_before_their_timeout(start, connect, monkeypatch, first_answer):
    monkeypatch.setattr("grpo_lib.generation.server_batch.WATCH_SECONDS", 0.05)
    silent, other = start(), start()
    engine = connect(silent, other, timeout_seconds=60)
    silent.gate.clear()
    answers = [first_answer]

    def fall_silent(body):
        silent.healthy = False
        return (answers.pop() if answers else None) or silent._row(body)

    silent.routes["POST", "/v1/completions"] = fall_silent
    began = time.monotonic()
    asked = request(n=2)
    assert_same(engine.generate(asked), local_rows(asked))
    assert time.monotonic() - began < 20 and len(other.asked) == 8


def test_without_a_server_the_error_names_all_and_the_remedy(start, connect):
    servers = [start(), start()]
    engine = connect(*servers, max_in_flight=1)
    for server in servers:
        server.delay = 0.02
        server.dies_after = 2
    with pytest.raises(ServerLostError) as caught:
        engine.generate(request(n=4))
    message = str(caught.value)
    assert all(server.url in message for server in servers)
    assert "4 of 16 rows were finished" in message and "within 0.5 s" in message
    assert "rollout.server.recovery_seconds" in message


def test_loading_without_a_server_is_the_same_error(start, connect):
    server = start()
    server.kill()
    with pytest.raises(ServerLostError, match=rf"{server.url}: GET /health failed.*no policy was loaded"):
        connect(server, recovery_seconds=0.1)


def test_loading_waits_for_a_server_that_comes_up(start, connect):
    server = start()
    server.kill()
    threading.Timer(0.3, lambda: server.start(make_model(7))).start()
    asked = request(n=1)
    assert_same(connect(server, recovery_seconds=10).generate(asked), local_rows(asked))


def test_a_server_that_restarts_during_a_batch_gets_the_policy_before_it_generates(start, connect):
    server = start()
    engine = connect(server, recovery_seconds=10, max_in_flight=2)
    server.dies_after = 3
    server.restart_once_dead(make_model(7), after=0.3)
    asked = request(n=4)
    assert_same(engine.generate(asked), local_rows(asked))
    assert len(server.loads) == 2 and server.held == engine.digest()


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_restarted_between_two_batches_gets_the_policy_before_it_generates(start, connect, kind):
    server = start(kind)
    engine, asked = connect(server), request(n=2)
    expected = engine.generate(asked)
    server.kill()
    server.start(make_model(7))
    assert_same(engine.generate(asked), expected)
    assert len(server.loads) == 2


def test_a_server_that_was_away_when_a_policy_was_loaded_gets_it_when_it_is_back(start, connect):
    away, other = start(), start()
    engine = connect(away, other, max_in_flight=1)
    away.kill()
    engine.load(make_model(1).state_dict())
    away.start(make_model(7))
    away.delay = other.delay = 0.02
    asked = request(n=4)
    assert_same(engine.generate(asked), local_rows(asked, seed=1))
    assert away.held == engine.digest() and len(away.asked) > 0


def test_a_server_that_comes_back_and_takes_no_policy_is_left_out(start, connect):
    server, other = start(), start()
    engine = connect(server, other)
    server.kill()
    server.start(make_model(7))
    server.logprobs_mode = "raw_logprobs"
    asked = request(n=2)
    assert_same(engine.generate(asked), local_rows(asked))
    assert len(other.asked) == 8
    other.kill()
    with pytest.raises(ServerLostError, match="--logprobs-mode processed_logprobs"):
        engine.generate(asked)


def test_people_read_which_server_is_out_and_when_it_is_back(start, connect):
    class Notes(Silent):
        def __init__(self):
            self.texts = []

        def note(self, text):
            self.texts.append(text)

    server, other = start(), start()
    engine = connect(server, other, max_in_flight=2)
    server.dies_after = 2
    other.delay = 0.1
    server.restart_once_dead(make_model(7), after=0.1)
    sink = Notes()
    show_progress_on(sink)
    try:
        engine.generate(request(n=8))
    finally:
        show_progress_on(Silent())
    lost, back = sink.texts
    assert lost.startswith(f"the generation server {server.url} is left out for now (POST /v1/completions failed")
    assert back == f"the generation server {server.url} is back"


def test_an_answer_that_nobody_understands_ends_the_batch(start, connect):
    server = start()
    engine = connect(server)
    server.held = None  # so that it gets the policy again
    server.routes["GET", "/version"] = lambda _: (200, {"release": "1"})
    with pytest.raises(KeyError, match="version"):
        engine.generate(request(n=1))


def test_a_server_that_other_weights_were_put_into_unseen_makes_the_batch_an_error(start, connect):
    server = start()
    engine = connect(server)

    def swap(answered):
        server.held = None

    server.on_answered = swap
    with pytest.raises(ServerLostError, match="other weights, while it generated"):
        engine.generate(request(n=1))


def test_a_row_of_sglang_that_came_from_other_weights_is_asked_for_again(start, connect):
    server, other = start("sglang"), start("sglang")
    engine = connect(server, other)
    server.row_version = "another"
    made = engine.generate(request(n=2))
    server.row_version = None
    assert_same(made, engine.generate(request(n=2)))
    assert len(other.asked) >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_weights_change_rows_and_digest_and_older_folders_go(start, connect, kind, tmp_path):
    servers = [start(kind), start(kind)]
    engine = connect(*servers)
    asked = request(n=2)
    before, digest = engine.generate(asked), engine.digest()
    state = make_model(1).state_dict()
    engine.load(state)
    after = engine.generate(asked)
    assert rows_of(after) != rows_of(before)
    assert digest != engine.digest() == weights_digest(state) == servers[0].held == servers[1].held
    (mine,) = (tmp_path / "shared").iterdir()
    assert [each.name for each in mine.iterdir()] == ["000002"]
    engine.close()
    assert list((tmp_path / "shared").iterdir()) == [] and not engine.alive


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_head_need_not_be_listed(start, connect, kind):
    state = make_model(1).state_dict()
    bare = {name: each for name, each in state.items() if name != "lm_head.weight"}
    engine, asked = connect(start(kind), load=False), request(n=1)
    engine.load(bare)
    rows = rows_of(engine.generate(asked))
    engine.load(state)
    assert engine.digest() == weights_digest(state) == weights_digest(bare) and rows == rows_of(engine.generate(asked))


def test_weights_go_to_the_servers_in_their_precision(start, connect):
    server = start()
    server.dtype = torch.bfloat16
    engine = connect(server, dtype=torch.bfloat16)
    assert engine.digest() == weights_digest(make_model(0).state_dict(), torch.bfloat16)
    written = load_tensors(server.loads[0], "policy")
    assert {each.dtype for each in written.values()} == {torch.bfloat16}
    assert written["lm_head.weight"] is written["model.embed_tokens.weight"]


def test_a_server_in_another_precision_is_found_out(start, connect):
    server = start()
    server.dtype = torch.bfloat16
    with pytest.raises(ParityError, match=r"holds .*--dtype must be model.dtype"):
        connect(server)


def test_weights_of_another_model_are_refused(start, connect):
    engine = connect(start(), load=False)
    with pytest.raises(ModelError, match="unknown: another"):
        engine.load(make_model(0).state_dict() | {"another": torch.zeros(1)})


def test_before_a_policy_is_loaded_there_is_no_digest_and_no_row(start, connect):
    engine = connect(start(), load=False)
    for call in (engine.digest, lambda: engine.generate(request())):
        with pytest.raises(ModelError, match="call load first"):
            call()


def test_a_folder_that_can_not_be_written_is_an_error_that_names_the_setting(start, connect, tmp_path):
    (tmp_path / "shared").write_text("a file")
    with pytest.raises(ConfigError, match=r"rollout.server.weights_folder must be a folder"):
        connect(start())


def test_how_a_vllm_server_must_be_started_is_said(start, connect):
    server = start()
    info = server.routes.pop(("GET", "/server_info"))
    with pytest.raises(ConfigError, match=r"VLLM_SERVER_DEV_MODE=1.*--worker-extension-cls grpo_lib"):
        connect(server)
    server.routes["GET", "/server_info"] = info
    server.logprobs_mode = "raw_logprobs"
    with pytest.raises(ConfigError, match=r"reports raw_logprobs.*--logprobs-mode processed_logprobs"):
        connect(server)
    server.logprobs_mode = "processed_logprobs"
    server.routes["POST", "/collective_rpc"] = lambda _: (500, {"error": {"message": "no attribute 'load_policy'"}})
    with pytest.raises(ConfigError, match=r"failed at load_policy.*no attribute.*weights_folder must be"):
        connect(server)


def test_how_an_sglang_server_must_be_started_is_said(start, connect):
    server = start("sglang")
    server.deterministic = False
    with pytest.raises(ConfigError, match="--enable-deterministic-inference"):
        connect(server)


def test_weights_that_sglang_can_not_find_are_an_error_with_its_message(start, connect):
    server = start("sglang")
    answer = {"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}
    server.routes["POST", "/update_weights_from_disk"] = lambda _: (400, answer)
    with pytest.raises(ConfigError, match=r"Failed to get weights iterator.*weights_folder must be a folder"):
        connect(server)


def test_older_versions_of_sglang_are_asked_by_their_paths(start, connect):
    server = start("sglang", old=True)
    assert connect(server).version == "sglang 0.5.9"


def test_a_server_of_another_kind_is_an_error_that_says_so(start, connect, model_folder, tmp_path):
    config = ServerConfig(urls=[start("sglang").url], kind="vllm", weights_folder=str(tmp_path))
    engine = ServerEngine(config, model_folder=model_folder, eos_token_ids=[EOS], dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"404.*rollout.server.kind and model"):
        engine.load(make_model(0).state_dict())


def test_a_server_with_too_short_a_context_is_an_error(start, connect):
    server = start()
    server.context = 8
    with pytest.raises(ConfigError, match=r"cut a row after [1-7] of 10 tokens.*--max-model-len"):
        connect(server).generate(request(n=8))


def test_the_api_key_is_sent_and_never_shown(start, connect, monkeypatch):
    server = start(key="right-secret")
    monkeypatch.setenv("SERVER_KEY", "right-secret")
    asked = request(n=1)
    assert_same(connect(server, api_key_variable="SERVER_KEY").generate(asked), local_rows(asked))
    monkeypatch.setenv("SERVER_KEY", "wrong-secret")
    with pytest.raises(
        ConfigError, match=r"401: Unauthorized: Bearer \*\*\*; is rollout.server.api_key_variable"
    ) as caught:
        connect(server, api_key_variable="SERVER_KEY")
    assert "secret" not in str(caught.value)
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(ConfigError, match=r"SERVER_KEY .*is not set"):
        connect(server, api_key_variable="SERVER_KEY")


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://"])
def test_what_is_no_url_is_refused(url, model_folder):
    config = ServerConfig(urls=[url], weights_folder="/tmp/x")
    with pytest.raises(ConfigError, match=r"rollout.server.urls"):
        ServerEngine(config, model_folder=model_folder, eos_token_ids=[EOS], dtype=torch.float32)


def test_urls_may_end_as_openai_clients_want_them(start, connect, model_folder, tmp_path):
    server = start()
    config = ServerConfig(urls=[server.url + "/v1/", server.url], weights_folder=str(tmp_path))
    engine = ServerEngine(config, model_folder=model_folder, eos_token_ids=[EOS], dtype=torch.float32)
    engine.load(make_model(0).state_dict())
    assert engine.version == "vllm 0.32.0" and len(server.loads) == 1
    engine.close()


def test_the_name_of_the_model_is_said_if_it_is_set(start, connect):
    server = start()
    connect(server, model="policy").generate(request(n=1))
    assert {each["model"] for each in server.asked} == {"policy"}


def test_a_budget_of_tokens_gives_rows_back_unfinished(start, connect, monkeypatch):
    monkeypatch.setattr("grpo_lib.generation.server_rows.SLICE", 4)
    engine = connect(start(), max_in_flight=3)
    sampling = Sampling(temperature=1.0, max_new_tokens=40)
    whole = engine.generate(request(sampling=sampling, budget=Budget(tokens=10_000)))
    assert UNFINISHED not in whole.finish.tolist()
    part = engine.generate(request(sampling=sampling, budget=Budget(tokens=60)))
    assert UNFINISHED in part.finish.tolist() and STOP in part.finish.tolist()
    assert 60 <= len(part.logprobs) <= 60 + 3 * 4
    ends = zip(part.finish.tolist(), whole.finish.tolist(), rows_of(part), rows_of(whole), strict=True)
    for finish, last, ids, all_ids in ends:
        assert (ids == all_ids and finish == last) if finish != UNFINISHED else ids == all_ids[: len(ids)]


def test_slices_are_rows_of_the_same_distribution_with_logprobs_of_the_whole(start, connect, monkeypatch):
    monkeypatch.setattr("grpo_lib.generation.server_rows.SLICE", 3)
    made = connect(start()).generate(request(sampling=SAMPLING, budget=Budget(tokens=10_000)))
    model = make_model(0)
    for row, ids in enumerate(rows_of(made)):
        prompt = PROMPTS[row // 4]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        start_at, end = made.responses.offsets[row : row + 2].tolist()
        torch.testing.assert_close(made.logprobs[start_at:end], expected, atol=1e-5, rtol=0)


def test_a_stop_string_that_begins_in_one_slice_ends_its_row_in_the_next(start, connect, monkeypatch):
    monkeypatch.setattr("grpo_lib.generation.server_rows.SLICE", 1)
    sampling = Sampling(temperature=1.0, max_new_tokens=40, stop=("12", "ab", "3c", "4a", "88", "a8"))
    made = connect(start()).generate(request(n=6, sampling=sampling, budget=Budget(tokens=10_000)))
    stopped = 0
    for ids, finish in zip(rows_of(made), made.finish.tolist(), strict=True):
        text = TOKENIZER.decode(ids, skip_special_tokens=False)
        places = [text.find(stop) for stop in sampling.stop if stop in text]
        assert all(place + 2 == len(text) for place in places)
        stopped += bool(places)
        assert finish == STOP or not places
    assert stopped > 3


def test_a_budget_of_seconds_waits_for_slices_under_way_and_starts_no_others(start, connect):
    server = start()
    server.delay = 0.1
    engine = connect(server, max_in_flight=2)
    made = engine.generate(request(n=16, budget=Budget(seconds=0.25)))
    assert len(server.asked) == server.answered < 64
    assert made.finish.tolist().count(UNFINISHED) == 64 - len(server.asked)


def test_progress_is_reported_in_the_calling_thread_up_to_all_rows(start, connect):
    server = start()
    server.delay = 0.03
    engine, calls = connect(server, max_in_flight=2), []
    made = engine.generate(request(), lambda *call: calls.append((threading.get_ident(), call)))
    assert {ident for ident, _ in calls} == {threading.get_ident()}
    reports = [call for _, call in calls]
    assert reports == sorted(reports) and len(reports) > 2
    assert reports[-1] == (16, 16, len(made.logprobs))


def test_an_exception_of_the_caller_ends_the_batch_and_the_engine_can_go_on(start, connect):
    server = start()
    server.delay = 0.05
    engine = connect(server, max_in_flight=1)

    def fail(*_):
        raise KeyError("cancelled")

    with pytest.raises(KeyError, match="cancelled"):
        engine.generate(request(), fail)
    server.delay = 0
    asked = request(n=1)
    assert_same(engine.generate(asked), local_rows(asked))


def test_sleeping_and_waking_change_nothing(start, connect):
    engine, asked = connect(start()), request(n=1)
    engine.sleep()
    engine.wake()
    assert_same(engine.generate(asked), local_rows(asked))
