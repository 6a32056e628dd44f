import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from grpo_lib.config import StoreConfig
from grpo_lib.config_base import UrlWithoutSecrets
from grpo_lib.config_data import FilesData
from grpo_lib.config_reward import RewardConfig, RewardFunctionConfig, RewardRunnerConfig
from grpo_lib.errors import ConfigError, RewardError
from grpo_lib.rewards import chat
from grpo_lib.rewards.chat import retry_after
from grpo_lib.rewards.endpoint import filled_in, judge, parsed
from grpo_lib.rewards.judges import Reward, make_judges
from grpo_lib.rewards.runner import Scores, score
from grpo_lib.types import NoRewardError, RewardResult, Sample
from grpo_lib.urls import without_secrets

KEY = "sk-very-secret-1234"
Reply = tuple[int, dict[str, str], Any]
"""Status, headers, body."""


def sample(response: str = "4", prompt: str = "2 + 2?", reference: str = "4") -> Sample:
    return Sample(
        prompt=prompt, response=response, reference=reference, data_source="d", response_tokens=1, finish_reason="stop"
    )


def says(text: str | None, finish: str = "stop", usage: dict[str, int] | None = None) -> Reply:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return 200, {}, {"choices": [choice]} | ({} if usage is None else {"usage": usage})


class Server:
    """What it was asked, and how many asked at a time at most."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply]) -> None:
        self.url, self.reply = "", reply
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.now, self.most = 0, 0
        self.lock = threading.Lock()

    def answer(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        with self.lock:
            self.times.append(time.monotonic())
            self.bodies.append(body)
            self.headers.append(headers)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            return self.reply(body) if path == "/v1/chat/completions" else (404, {}, "no such path")
        finally:
            with self.lock:
                self.now -= 1


@contextmanager
def server(reply: Callable[[dict[str, Any]], Reply]) -> Iterator[Server]:
    made = Server(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # headers and body in one packet

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, extra, answer = made.answer(self.path, headers, body)
            text = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            try:
                self.send_response(status)
                for name, value in {"content-length": str(len(text)), **extra}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)
            except OSError:
                pass  # nobody waits for it any more

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    http = Listener(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{http.server_port}/v1"
    try:
        yield made
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@contextmanager
def replies(*given: Reply) -> Iterator[Server]:
    """A server that gives these in turn."""
    rest = iter(given)
    with server(lambda body: next(rest)) as made:
        yield made


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "FIRST_PAUSE", 0.01)


def ask(where: Server, given: Sample | None = None, **options: Any) -> RewardResult:
    chosen = {"url": where.url, "model": "m", "prompt": "Rate: {response}", "pattern": r"Score: (\S+)"} | options
    return asyncio.run(judge(given or sample(), **chosen))


def score_all(where: Server, samples: list[Sample], settings: RewardConfig, **options: Any) -> Scores:
    """Through the runner."""
    chosen = {"url": where.url, "model": "m", "prompt": "Rate: {response}", "pattern": r"Score: (\S+)"} | options
    plugins = ["grpo_lib.rewards.endpoint"]
    judges = make_judges([RewardFunctionConfig(name="judge", kwargs=chosen)], plugins)
    return score(samples, Reward(judges=judges, settings=settings, plugins=plugins))


# --- the question -----------------------------------------------------------------------------------------------------


def test_texts_of_the_sample_are_filled_in_once_and_other_braces_stay() -> None:
    template = 'Q: {prompt} A: {response} Right: {reference}. Say {"score": 1}, {other}'
    given = sample(response="{reference} {prompt}", prompt="2{response}", reference="four")
    assert filled_in(template, given) == (
        'Q: 2{response} A: {reference} {prompt} Right: four. Say {"score": 1}, {other}'
    )


def test_the_request_is_what_the_options_say() -> None:
    with replies(says("Score: 1")) as there:
        ask(there, system="Be fair.", max_tokens=7, extra={"seed": 3})
    assert there.bodies == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "Be fair."}, {"role": "user", "content": "Rate: 4"}],
            "temperature": 0.0,
            "max_tokens": 7,
            "seed": 3,
        }
    ]
    assert "authorization" not in there.headers[0]


def test_what_is_null_is_not_sent() -> None:
    with replies(says("Score: 1")) as there:
        ask(there, temperature=None, max_tokens=None)
    assert set(there.bodies[0]) == {"model", "messages"}


def test_the_question_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "question.txt").write_text("Grüße: {response}", encoding="utf-8")
    with replies(says("Score: 1")) as there:
        ask(there, prompt=None, prompt_file=str(tmp_path / "question.txt"))
    assert there.bodies[0]["messages"][0]["content"] == "Grüße: 4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": None}, "prompt and prompt_file: give one of them"),
        ({"prompt_file": "p.txt"}, "prompt and prompt_file: give one of them"),
        ({"prompt": "Rate it"}, r"has no \{response\}"),
        ({"field": "score"}, "pattern and field: give one of them"),
        ({"low": 1.0}, "low=1.0, high=None: give both"),
        ({"low": 2.0, "high": 1.0}, "low=2.0, high=1.0"),
        ({"prompt_price": 1.0}, "prompt_price and completion_price: give both or neither"),
        ({"api_key_variable": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE .* is not set"),
    ],
)
def test_options_that_do_not_fit_together_are_refused_before_anybody_is_asked(
    options: dict[str, Any], message: str
) -> None:
    with replies() as there:
        with pytest.raises(ConfigError, match=message):
            ask(there, **options)
        assert there.bodies == []


# --- the answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "rule", "value"),
    [
        ("Score: 3\nNo. Score: 7.5", {"pattern": r"Score: ([\d.]+)"}, 7.5),
        ("Score: 7", {"pattern": r"Score: (\d+)", "low": 1.0, "high": 10.0}, 2 / 3),
        ("I say YES", {"pattern": r"\b(yes|no|YES)\b", "values": {"Yes": 1, "no": 0}}, 1.0),
        ("better", {"pattern": r"(\w+)$", "values": {"better": 2, "worse": -2}, "low": -4, "high": 4}, 0.75),
        ('{"score": 0.25}', {"field": "score"}, 0.25),
        ('So:\n```json\n{"all": [{"mark": "4"}, {"mark": "5"}]}\n```', {"field": "all.1.mark"}, 5.0),
        ('{"right": true}', {"field": "right", "values": {"true": 1, "false": 0}}, 1.0),
        ("-3", {"pattern": r"(\S+)"}, -3.0),
        ("+.5", {"pattern": r"(\S+)"}, 0.5),
        ("7.", {"pattern": r"(\S+)"}, 7.0),
        ("1.5e-1", {"pattern": r"(\S+)"}, 0.15),
    ],
)
def test_a_value_is_read_from_an_answer(answer: str, rule: dict[str, Any], value: float) -> None:
    assert parsed(answer, **rule) == pytest.approx(value)


NO_NUMBERS = ("1_0", "inf", "-inf", "Infinity", "NaN", "1e999", "0x10", "\u0661", "1,5", "1/2", "--1", ".", "e5", "1e")


@pytest.mark.parametrize(
    ("answer", "rule", "reason"),
    [
        ("I won't say", {"pattern": r"Score: (\d+)"}, r"answer \"I won't say\" has no Score"),
        ("Score: good", {"pattern": r"Score: (\w+)"}, "says 'good', which is no number"),
        ("maybe", {"pattern": r"(\w+)", "values": {"yes": 1, "no": 0}}, "says 'maybe'; values knows yes, no"),
        (
            "Score: 11",
            {"pattern": r"Score: (\d+)", "low": 1, "high": 10},
            "says 11, which is not from low=1 to high=10",
        ),
        ("Score: nan", {"pattern": r"Score: (\w+)", "low": 1, "high": 10}, "says 'nan', which is no number"),
        *(
            (f"Score: {word}", {"pattern": r"Score: (\S+)"}, f"says '{word}', which is no number")
            for word in NO_NUMBERS
        ),
        ('{"score": 1e999}', {"field": "score"}, "says 'Infinity', which is no number"),
        ('{"score": 1', {"field": "score"}, "has no score"),
        ('{"score": 1}', {"field": "mark"}, "has no mark"),
        ('{"score": [1]}', {"field": "score.1"}, r"has no score\.1"),
        ('{"score": null}', {"field": "score"}, "says 'null', which is no number"),
    ],
)
def test_an_answer_that_says_no_value_on_the_scale_is_an_error(answer: str, rule: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parsed(answer, **rule)


def test_tokens_and_cost_are_what_was_spent_and_the_answer_is_kept() -> None:
    with replies(says("Because. Score: 0.5", usage={"prompt_tokens": 2000, "completion_tokens": 10})) as there:
        result = ask(there, prompt_price=0.5, completion_price=2.0)
    assert result.value == 0.5
    assert result.text == "Because. Score: 0.5"
    assert result.components == {}
    assert result.spent == {
        "prompt_tokens": 2000.0,
        "completion_tokens": 10.0,
        "cost": pytest.approx(2000 * 0.5e-6 + 10 * 2e-6),
    }


def test_an_endpoint_that_counts_no_tokens_tells_nothing_of_what_was_spent() -> None:
    with replies(says("Score: 1")) as there:
        assert ask(there, prompt_price=0.5, completion_price=2.0).spent == {}


@pytest.mark.parametrize("word", ["inf", "1e999", "1_0", "nan"])
def test_what_is_no_number_is_paid_for_all_the_same(word: str) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 20}
    with replies(says(f"Score: {word}", usage=usage)) as there:
        settings = RewardConfig(max_failed=1.0)
        scores = score_all(there, [sample()], settings, prompt_price=1.0, completion_price=2.0)
    assert scores.values == [None]
    assert scores.reasons == [f"the judge says '{word}', which is no number: say in values what it is"]
    assert scores.components == {
        "prompt_tokens": [100.0],
        "completion_tokens": [20.0],
        "cost": [pytest.approx(140e-6)],
    }


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("Score: (", r"kwargs\.pattern='Score: \(': is no regular expression: missing \), "),
        (r"Score: \d+", r"kwargs\.pattern='Score: .*': has no group: put what the judge says into parentheses"),
        (r"Score: (?:\d+)", r"kwargs\.pattern=.*: has no group"),
        ("", r"kwargs\.pattern='': has no group"),
    ],
)
def test_a_pattern_that_finds_nothing_is_refused_before_anybody_is_asked(pattern: str, message: str) -> None:
    with replies() as there:
        with pytest.raises(ConfigError, match=message):
            score_all(there, [sample()], RewardConfig(), pattern=pattern)
        assert there.bodies == []


@pytest.mark.parametrize("reply", [("I won't say", "stop"), ("Score: 1", "length"), ("", "stop"), (None, "stop")])
def test_an_answer_that_gives_no_reward_is_paid_for_all_the_same(reply: tuple[str | None, str]) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 20}
    with replies(says(*reply, usage=usage)) as there, pytest.raises(NoRewardError) as raised:
        ask(there, prompt_price=1.0, completion_price=2.0)
    assert raised.value.spent == {
        "prompt_tokens": 100.0,
        "completion_tokens": 20.0,
        "cost": pytest.approx(140e-6),
    }


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (says("Score: 1", finish="length"), "was cut: raise max_tokens. 'Score: 1'"),
        (says(None, finish="content_filter"), "is empty .finish_reason=content_filter"),
        (says("  "), "is empty"),
        ((200, {}, {"error": "no"}), r"no choices\[0\].message.content in '{\"error\": \"no\"}'"),
        ((400, {}, "no such field"), "answers with 400: 'no such field'"),
        ((404, {}, ""), "404: ''; are url and model right"),
    ],
)
def test_what_is_no_whole_answer_is_an_error_at_once(reply: Reply, reason: str) -> None:
    with replies(reply) as there:
        with pytest.raises((RewardError, NoRewardError), match=reason):
            ask(there)
        assert len(there.bodies) == 1


def test_text_that_can_not_be_stored_is_mended() -> None:
    with replies(says("\ud800 Score: 1")) as there:
        assert ask(there).text == "? Score: 1"


# --- trying again -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hurry")
def test_an_endpoint_that_fails_is_asked_again() -> None:
    cut: Reply = (200, {}, '{"choices": [')
    with replies((500, {}, "oh"), (503, {}, ""), cut, says("Score: 1")) as there:
        assert ask(there, retries=3).value == 1.0
    assert len(there.bodies) == 4
    assert there.bodies[0] == there.bodies[3]


@pytest.mark.usefixtures("hurry")
def test_a_retry_waits_as_long_as_the_endpoint_asks() -> None:
    with replies((429, {"retry-after": "1"}, "slowly"), says("Score: 1")) as there:
        assert ask(there).value == 1.0
    assert 1.0 <= there.times[1] - there.times[0] < 10


@pytest.mark.usefixtures("hurry")
def test_the_last_failure_is_told_when_there_are_no_retries_left() -> None:
    reason = r"answers with 502: 'dear' \(tried 2 times\)"
    with replies((500, {}, "oh"), (502, {}, "dear")) as there, pytest.raises(RewardError, match=reason):
        ask(there, retries=1)


@pytest.mark.usefixtures("hurry")
def test_silence_is_tried_again_too() -> None:
    def reply(body: dict[str, Any]) -> Reply:
        if len(there.bodies) < 3:
            time.sleep(0.5)
        return says("Score: 1")

    with server(reply) as there:
        with pytest.raises(RewardError, match=r"no answer within request_seconds=0.1 \(tried 2 times\)"):
            ask(there, retries=1, request_seconds=0.1)
        assert ask(there, retries=1).value == 1.0


@pytest.mark.usefixtures("hurry")
def test_nobody_there_is_an_error_that_names_the_place() -> None:
    with replies() as there:
        pass
    with pytest.raises(RewardError, match=f"no answer from {there.url}: ConnectError"):
        ask(there, retries=1)


def test_who_is_out_of_time_says_what_it_waited_for() -> None:
    async def until_answered(there: Server, limit: asyncio.Timeout) -> None:
        while len(there.headers) < 2:
            await asyncio.sleep(0.01)
        limit.reschedule(asyncio.get_running_loop().time() + 0.5)

    async def patient(there: Server) -> None:
        async with asyncio.timeout(60) as limit:
            watch = asyncio.create_task(until_answered(there, limit))
            await judge(sample(), url=there.url, model="m", prompt="{response}", pattern="1")
            await watch

    with replies(says("Score: 1"), (429, {"retry-after": "60"}, "slowly")) as there:
        ask(there)  # what is imported at the first question does not count
        with pytest.raises(TimeoutError) as raised:
            asyncio.run(patient(there))
    assert raised.value.__cause__ is not None
    assert raised.value.__cause__.__notes__ == ["the endpoint answers with 429: 'slowly' (tried 1 times)"]


def test_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after("7") == 7.0
    assert retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)) == pytest.approx(
        30, abs=2
    )
    assert retry_after(format_datetime(datetime.now(UTC) - timedelta(seconds=30), usegmt=True)) == 0.0
    assert [retry_after(each) for each in ("", "soon", "-3", "1.5")] == [0.0] * 4


# --- the key ----------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY + "\n")
    with replies(says(f"your key is {KEY}. Score: 1"), (401, {}, f"bad key {KEY}"), says(f"no, {KEY}")) as there:
        result = ask(there, api_key_variable="JUDGE_KEY")
        assert result.text == "your key is ***. Score: 1"
        for _ in range(2):
            with pytest.raises((RewardError, NoRewardError), match=r"\*\*\*") as raised:
                ask(there, api_key_variable="JUDGE_KEY")
            assert KEY not in str(raised.value)
    assert [each["authorization"] for each in there.headers] == [f"Bearer {KEY}"] * 3


@pytest.mark.parametrize("key", ["sk-äö", "sk-a\nb"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with replies() as there, pytest.raises(ConfigError, match="JUDGE_KEY holds characters") as raised:
        ask(there, api_key_variable="JUDGE_KEY")
    assert "sk-" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"http://me:{KEY}@host/v1", r"kwargs\.url='http://host/v1': the URL of host holds a password"),
        (f"http://me:a/{KEY}@host/v1", r"kwargs\.url='http://host/v1': this URL can't be read"),
        (f"http://me:a@{KEY}@host/v1", r"kwargs\.url='http://host/v1': the URL of host holds a password"),
        (f"http://h\u2100st:{KEY}@host/v1", r"kwargs\.url='http://host/v1': this URL can't be read"),
        (f"http://{KEY}@host/v1", r"kwargs\.url='http://host/v1': the URL of host holds a user or a key"),
        (f"http://host/v1?api_key={KEY}", r"kwargs\.url='http://host/v1\?\.\.\.': the URL of host holds a secret"),
        (f"http://host/v1?user=me&password={KEY}", r"kwargs\.url='http://host/v1\?\.\.\.': the URL of host holds"),
    ],
)
def test_a_url_with_a_password_is_refused_without_being_shown(url: str, message: str) -> None:
    options = {"url": url, "model": "m", "prompt": "{response}", "pattern": "(1)"}
    with pytest.raises(ConfigError, match=message) as raised:
        make_judges([RewardFunctionConfig(name="judge", kwargs=options)], [])
    assert KEY not in str(raised.value)


URL: TypeAdapter[str] = TypeAdapter(UrlWithoutSecrets)


@pytest.mark.parametrize(
    ("url", "held"),
    [
        (f"https://{KEY}@h/v1?api_key={KEY}", "a secret in its query (a name that ends in key)"),
        (f"https://{KEY}@h/v1", "a user or a key (before an @; "),
        (f"HTTP://{KEY}@h:80", "a user or a key"),
        (f"https://{KEY}/x@h/v1", "a user or a key"),
        ("https://@h/v1", "a user or a key"),
        (f"https://me:{KEY}@h/v1", "a password"),
        (f"s3://me:{KEY}@h/prefix", "a password"),
        (f"postgresql://me:{KEY}@h/db", "a password"),
        (f"mysql://h/db?password={KEY}", "a password"),
        (f"https://h/v1?a=1&key={KEY}", "a secret in its query (a name that ends in key)"),
        (f"https://h/v1?apikey={KEY}", "ends in key)"),
        (f"https://h/v1?API-KEY={KEY}", "ends in key)"),
        (f"https://h/v1?token={KEY}", "ends in token)"),
        (f"https://h/v1?access_token={KEY}", "ends in token)"),
        (f"https://h/v1?accessToken={KEY}", "ends in token)"),
        (f"https://h/v1?secret={KEY}", "ends in secret)"),
        (f"https://h/v1?client_secret={KEY}", "ends in secret)"),
        (f"https://h/v1?se=2030&sig={KEY}", "ends in sig)"),
        (f"https://h/v1?X-Amz-Signature={KEY}", "ends in signature)"),
        (f"https://h/v1?a=1;token={KEY}", "ends in token)"),
        (f"https://h/v1?%6Bey={KEY}", "ends in key)"),
        (f"https://h/v1#token={KEY}", "ends in token)"),
        (f"s3://h/prefix?token={KEY}", "ends in token)"),
    ],
)
def test_a_url_that_holds_a_secret_is_refused_and_the_message_names_none(url: str, held: str) -> None:
    with pytest.raises(ValidationError) as raised:
        URL.validate_python(url)
    message = raised.value.errors()[0]["msg"]
    assert message.startswith("Value error, the URL of h holds a ") and held in message
    assert "take it out and set it in the environment" in message
    assert KEY not in message and "sk-" not in message.casefold()
    for section in (StoreConfig, FilesData):
        with pytest.raises(ValidationError, match="the URL of h holds"):
            section.model_validate({"train": ["x"], "endpoint_url": url})


@pytest.mark.parametrize(
    "url",
    ["http://h:8000/v1", "https://h/v1?version=2&monkey=1&max_tokens=7&key=", "postgresql://me@h/db", "data/t@1.jsonl",
     "s3://bucket/prefix", "grpo-store", "sqlite:////tmp/token=1.db", "https://h/a%40b", "data/part-?.jsonl"],
)  # fmt: skip
def test_a_url_without_a_secret_is_taken_as_it_is(url: str) -> None:
    assert URL.validate_python(url) == url


def test_messages_hold_neither_query_nor_fragment_of_a_url() -> None:
    assert without_secrets(f"a http://h/v1#token={KEY} b") == "a http://h/v1#... b"
    assert without_secrets(f"a http://{KEY}@h/v1?x=1#token={KEY} b") == "a http://h/v1?... b"


def test_a_url_in_an_option_of_another_kind_is_shown_without_its_secrets() -> None:
    for options in (
        {"url": [f"http://me:{KEY}@host/v1"]},
        {"url": {"a": f"http://{KEY}@host/v1"}},
        {"request_seconds": f"http://host/v1?key={KEY}"},
    ):
        with pytest.raises(ConfigError, match="http://host/v1") as raised:
            make_judges([RewardFunctionConfig(name="judge", kwargs={"url": "http://a", "model": "m"} | options)], [])
        assert KEY not in str(raised.value)


def test_an_endpoint_that_can_not_be_reached_is_named_without_secrets() -> None:
    with pytest.raises(RewardError, match=r"no answer from http://127\.0\.0\.1:1/v1") as raised:
        ask(Server(lambda body: says("")), url=f"http://{KEY}@127.0.0.1:1/v1", retries=0)
    assert KEY not in str(raised.value)
    with pytest.raises(ConfigError, match="url=xyz://host: Request URL has an unsupported protocol") as refused:
        ask(Server(lambda body: says("")), url=f"xyz://{KEY}@host", retries=0)
    assert KEY not in str(refused.value)


# --- through the runner -----------------------------------------------------------------------------------------------


def test_the_runner_asks_side_by_side_and_keeps_order_text_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    full = threading.Event()

    def reply(body: dict[str, Any]) -> Reply:
        if there.most >= 8:
            full.set()
        full.wait(30)
        time.sleep(0.05)  # if there were a ninth it would come now
        number = int(body["messages"][0]["content"].removeprefix("Rate: "))
        if number == 5:
            return says(f"I can't, {KEY}", usage={"prompt_tokens": 5, "completion_tokens": 1})
        if number == 6:
            return 400, {}, f"refused {KEY}"
        return says(f"Score: {number}", usage={"prompt_tokens": number, "completion_tokens": 1})

    settings = RewardConfig(max_failed=1.0, timeout_seconds=60, runner=RewardRunnerConfig(concurrency=8))
    with server(reply) as there:
        scores = score_all(there, [sample(str(each)) for each in range(40)], settings, api_key_variable="JUDGE_KEY")
    assert there.most == 8
    assert scores.values == [None if each in (5, 6) else float(each) for each in range(40)]
    assert scores.components["prompt_tokens"] == [None if each == 6 else float(each) for each in range(40)]
    assert list(scores.components) == ["prompt_tokens", "completion_tokens"]
    assert scores.reasons[5] == "the judge's answer \"I can't, ***\" has no Score: (\\S+)"
    assert scores.reasons[6] == "RewardError: the endpoint answers with 400: 'refused ***'"
    result = scores.verdicts["judge"][3]
    assert isinstance(result, RewardResult)
    assert result.text == "Score: 3"
    assert KEY not in repr(scores)


def test_the_runner_keeps_to_its_rate() -> None:
    settings = RewardConfig(runner=RewardRunnerConfig(concurrency=8, rate=20))
    with server(lambda body: says("Score: 1")) as there:
        scores = score_all(there, [sample() for _ in range(28)], settings)
    assert scores.values == [1.0] * 28
    assert there.times[-1] - there.times[7] > 0.9  # the last twenty, of a twentieth of a second each


def test_requests_that_are_made_again_count_against_the_rate() -> None:
    def reply(body: dict[str, Any]) -> Reply:
        asked = [each["messages"][0]["content"] for each in there.bodies]
        return says("Score: 1") if asked.count(body["messages"][0]["content"]) > 1 else (503, {}, "")

    settings = RewardConfig(runner=RewardRunnerConfig(concurrency=16, rate=5), timeout_seconds=60)
    with server(reply) as there:
        scores = score_all(there, [sample(str(each)) for each in range(12)], settings)
    assert scores.values == [1.0] * 12
    assert len(there.times) == 24
    # 23 times a fifth of a second; the samples alone, and a second for the last of them to be asked again, were 3.2 s
    assert there.times[-1] - there.times[0] > 3.7


def test_with_another_function_what_a_judge_spends_has_its_name() -> None:
    with server(lambda body: says("Score: 1", usage={"prompt_tokens": 7, "completion_tokens": 1})) as there:
        options = {"url": there.url, "model": "m", "prompt": "{response}", "pattern": r"Score: (\S+)"}
        functions = [RewardFunctionConfig(name="judge", kwargs=options), RewardFunctionConfig(name="gsm8k")]
        reward = Reward(judges=make_judges(functions, []), settings=RewardConfig(max_failed=1.0))
        scores = score([sample("#### 4"), sample("#### 4", reference="no number")], reward)
    assert scores.values == [2.0, None]
    assert scores.components == {
        "judge": [1.0, None],
        "gsm8k": [1.0, None],
        "correct": [1.0, None],
        "gsm8k/correct": [1.0, None],
        "judge/prompt_tokens": [7.0, 7.0],
        "judge/completion_tokens": [1.0, 1.0],
    }


def test_a_judge_that_takes_too_long_makes_a_null_and_the_others_go_on() -> None:
    over = threading.Event()

    def reply(body: dict[str, Any]) -> Reply:
        if body["messages"][0]["content"] == "Rate: slow":
            over.wait(30)
        return says("Score: 1")

    settings = RewardConfig(timeout_seconds=4.0, max_failed=1.0)
    with server(reply) as there:
        scores = score_all(there, [sample("a"), sample("slow"), sample("b")], settings)
        over.set()
    assert scores.values == [1.0, None, 1.0]
    assert "took longer than reward.timeout_seconds=4" in str(scores.reasons[1])
