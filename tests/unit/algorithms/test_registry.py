from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from pydantic import Field

from grpo_lib.algorithms.advantages import ADVANTAGES
from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.filters import FILTERS
from grpo_lib.algorithms.groupings import GROUPINGS
from grpo_lib.algorithms.kl import KL_ESTIMATORS
from grpo_lib.algorithms.losses import LOSSES
from grpo_lib.algorithms.metrics import METRICS
from grpo_lib.algorithms.registry import Entry, Registry, call, nearest
from grpo_lib.errors import ConfigError

EVERY: list[Registry[Any]] = [ADVANTAGES, LOSSES, KL_ESTIMATORS, AGGREGATIONS, FILTERS, GROUPINGS, METRICS]
ENTRIES = [pytest.param(registry, entry, id=f"{entry.kind}: {entry.name}") for registry in EVERY for entry in registry]

Warmth = Annotated[float, Field(ge=0, le=1, description="How warm.")]

COLUMNS = {"who": "a name", "when": "an hour"}


@pytest.fixture
def greetings() -> Registry[Callable[..., str]]:
    registry: Registry[Callable[..., str]] = Registry("greeting", COLUMNS, ("who",))

    def lower(who: str, *, letters: Annotated[int, Field(gt=0)] = 3) -> str:
        return who[:letters].lower()

    @registry.register("hello", formula="hello, who", paper="ours", use="always", aliases=["hi"])
    def hello(who: str) -> str:
        return f"hello {who}"

    @registry.register("welcome", aliases=["come_in"], helper=lower, loud=True)
    def welcome(when: str, who: str, *, warmth: Warmth = 0.5, times: int) -> str:
        """Says it more than once.

        And more.
        """
        return f"{when} welcome {who} {warmth} {times}"

    return registry


# ------------------------------------------------------------------------------------------------------ registering


def test_an_entry_holds_what_was_said_of_the_function(greetings: Registry[Callable[..., str]]) -> None:
    entry = greetings["hello"]
    assert (entry.name, entry.kind, entry.aliases) == ("hello", "greeting", ("hi",))
    assert (entry.formula, entry.paper, entry.use) == ("hello, who", "ours", "always")
    assert entry.function("you") == "hello you"


def test_a_helper_may_name_its_own_columns_only(greetings: Registry[Callable[..., str]]) -> None:
    def late(when: str) -> str:
        return when

    with pytest.raises(ConfigError, match=r"wants a column 'when'; known: who"):
        greetings.register("late", helper=late)(lambda who: who)
    assert "late" not in greetings


def test_an_alias_is_the_same_entry(greetings: Registry[Callable[..., str]]) -> None:
    assert greetings["hi"] is greetings["hello"]
    assert "come_in" in greetings and "out" not in greetings
    assert greetings.names() == ["come_in", "hello", "hi", "welcome"]
    assert [entry.name for entry in greetings] == ["hello", "welcome"]  # each once


def test_traits_are_kept_for_those_who_call(greetings: Registry[Callable[..., str]]) -> None:
    assert (greetings["hello"].traits, greetings["welcome"].traits) == ({}, {"loud": True})


def test_without_a_use_the_first_line_of_the_docstring_is_it(greetings: Registry[Callable[..., str]]) -> None:
    assert greetings["welcome"].use == "Says it more than once."


def test_the_function_itself_stays_what_it_was() -> None:
    registry: Registry[Callable[..., str]] = Registry("greeting", {})

    def hello() -> str:
        return "hello"

    assert registry.register("hello")(hello) is hello


@pytest.mark.parametrize(("name", "aliases"), [("hello", []), ("hi", []), ("ahoy", ["hello"]), ("ahoy", ["hi"])])
def test_a_taken_name_is_refused_with_both_places(
    greetings: Registry[Callable[..., str]], name: str, aliases: list[str]
) -> None:
    taken = (aliases or [name])[0]
    first = greetings[taken]

    def ahoy(who: str) -> str:
        return f"ahoy {who}"

    with pytest.raises(ConfigError, match=f"greeting '{taken}'.*is registered already") as refused:
        greetings.register(name, aliases=aliases)(ahoy)
    for function in (first.function, ahoy):
        assert f"{__file__}:{function.__code__.co_firstlineno}" in str(refused.value)
    assert greetings[taken] is first


def test_a_column_that_there_is_not_is_refused_with_the_nearest(greetings: Registry[Callable[..., str]]) -> None:
    with pytest.raises(ConfigError, match=r"greeting 'bye'.*wants a column 'whom'; did you mean who\?") as refused:

        @greetings.register("bye")
        def bye(whom: str) -> str:
            return whom

    assert "options must be keyword-only" in str(refused.value)
    assert "bye" not in greetings


def test_a_column_far_off_is_answered_with_all_columns(greetings: Registry[Callable[..., str]]) -> None:
    with pytest.raises(ConfigError, match=r"wants a column 'zzz'; known: when, who"):
        greetings.register("bye")(lambda zzz: zzz)


# ------------------------------------------------------------------------------------------------------- looking up


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown advantage estimator 'drgrpo'; did you mean dr_grpo"):
        ADVANTAGES["drgrpo"]


def test_a_name_far_off_is_answered_with_all_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown KL estimator 'zzz'; known: abs, full, k1, k2, k3, kl, low_var_kl"):
        KL_ESTIMATORS["zzz"]


def test_the_nearest_names_are_at_most_three() -> None:
    assert nearest("aaab", ["aaaa", "aaac", "aaad", "aaae", "zzzz"]).count(",") == 2
    assert nearest("x", []) == "known: "


# ---------------------------------------------------------------------------------------------- columns and options


def test_positional_parameters_are_columns_in_their_order(greetings: Registry[Callable[..., str]]) -> None:
    assert greetings["hello"].columns == ("who",)
    assert greetings["welcome"].columns == ("when", "who")


def test_a_bound_function_gets_its_columns_by_name_and_its_options(greetings: Registry[Callable[..., str]]) -> None:
    bound = greetings["welcome"].bind({"times": 2, "letters": 9}, "options")
    columns = SimpleNamespace(who="you", when="noon", more="nothing asks for this")
    assert call(bound, columns) == "noon welcome you 0.5 2"


def test_options_of_the_helper_are_options_of_the_entry(greetings: Registry[Callable[..., str]]) -> None:
    entry = greetings["welcome"]
    assert set(entry.options.model_fields) == {"letters", "warmth", "times"}
    helper = entry.bind_helper({"times": 2, "letters": 2}, "options")
    assert helper is not None and call(helper, SimpleNamespace(who="YOU")) == "yo"
    assert greetings["hello"].bind_helper({}, "options") is None


def test_options_carry_their_descriptions_and_defaults(greetings: Registry[Callable[..., str]]) -> None:
    fields = greetings["welcome"].options.model_fields
    assert fields["warmth"].description == "How warm."
    assert (fields["warmth"].default, fields["letters"].default, fields["times"].is_required()) == (0.5, 3, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": 1, "warmht": 0.1}, "x.options.warmht: greeting 'welcome' has no such option; did you mean warmth?"),
        ({"times": 1, "zzz": 0.1}, "x.options.zzz: greeting 'welcome' has no such option; known: letters, times, w"),
        ({}, "x.options.times: greeting 'welcome' needs it"),
        ({"times": 1, "warmth": 1.5}, "x.options.warmth=1.5: Input should be less than or equal to 1"),
        ({"times": 1, "warmth": float("nan")}, "x.options.warmth=nan: "),
        ({"times": "often"}, "x.options.times='often': Input should be a valid integer"),
        ({"times": 1, "letters": 0}, "x.options.letters=0: Input should be greater than 0"),
    ],
)
def test_wrong_options_are_refused_by_the_setting_and_the_value(
    greetings: Registry[Callable[..., str]], options: dict[str, object], message: str
) -> None:
    for bind in (greetings["welcome"].bind, greetings["welcome"].bind_helper):
        with pytest.raises(ConfigError) as refused:
            bind(options, "x.options")
        assert str(refused.value).startswith(message)


def test_every_wrong_option_is_named(greetings: Registry[Callable[..., str]]) -> None:
    with pytest.raises(ConfigError, match=r"x\.warmth=2: .*; x\.times: .* needs it"):
        greetings["welcome"].bind({"warmth": 2}, "x")


def test_an_option_of_a_function_without_options_is_refused(greetings: Registry[Callable[..., str]]) -> None:
    with pytest.raises(ConfigError, match=r"^x\.warmth: greeting 'hello' has no such option; it has none$"):
        greetings["hello"].bind({"warmth": 0.1}, "x")


# ----------------------------------------------------------------------------------------------------- what we have


@pytest.mark.parametrize(("registry", "entry"), ENTRIES)
def test_every_entry_says_its_formula_its_paper_and_its_use(
    registry: Registry[Callable[..., object]], entry: Entry[Callable[..., object]]
) -> None:
    assert entry.formula and entry.paper and entry.use
    assert (registry[entry.name], entry.kind) == (entry, registry.kind)
    assert all(registry[alias] is entry for alias in entry.aliases)


@pytest.mark.parametrize(("registry", "entry"), ENTRIES)
def test_every_option_says_what_it_does_and_has_a_default(
    registry: Registry[Callable[..., object]], entry: Entry[Callable[..., object]]
) -> None:
    for name, option in entry.options.model_json_schema()["properties"].items() if entry.options.model_fields else ():
        assert any("description" in each for each in (option, *option.get("anyOf", []))), name
        assert "default" in option, name
    entry.bind({}, registry.kind)


@pytest.mark.parametrize("registry", EVERY, ids=lambda registry: registry.kind)
def test_every_column_says_what_it_is(registry: Registry[Callable[..., object]]) -> None:
    assert registry.columns and all(registry.columns.values())


@pytest.mark.parametrize(
    ("registry", "names"),
    [
        (
            ADVANTAGES,
            "dr_grpo gae gdpo gpg grpo grpo_passk grpo_process opo optimal_token_baseline otb reinforce_plus_plus "
            "reinforce_plus_plus_baseline remax rloo",
        ),
        (KL_ESTIMATORS, "abs full k1 k2 k3 kl low_var_kl mse"),
        (AGGREGATIONS, "seq-mean-token-mean seq-mean-token-sum seq-mean-token-sum-norm token-mean token-sum"),
        (FILTERS, "dynamic_sampling pf_ppo"),
        (GROUPINGS, "data_source prompt"),
        (METRICS, "best_of_group group_std length_of_rewarded"),
    ],
    ids=lambda each: each.kind if isinstance(each, Registry) else "",
)
def test_the_names_are_those_of_the_specification(registry: Registry[Callable[..., object]], names: str) -> None:
    assert registry.names() == names.split()
