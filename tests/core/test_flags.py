"""The command line says what its help promises, and every mistake on it is answered in one line."""

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.config import load
from cairn.core.errors import CairnError, UsageError
from cairn.core.help import usage
from cairn.core.schema import AlsoFlag, leaves


class Nested(msgspec.Struct, frozen=True):
    rate: float = 0.5
    fused: bool = True


class Command(msgspec.Struct, frozen=True):
    """A command with one flag of each kind."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    prompts: tyro.conf.Positional[list[str]] = []
    begin: Annotated[str | None, tyro.conf.arg(name="from")] = None
    max_tokens: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 16
    kind: Literal["a", "b-c"] = "a"
    stop: list[str] = []
    sizes: tuple[int, ...] = ()
    pair: tuple[int, float] = (1, 2.0)
    out: Path | None = None
    json: bool = False
    nested: Nested = Nested()


def run(*args: str) -> Command:
    return load(Command, args=list(args), env_prefix="CAIRN_COMMAND_", env={}).value


def failure(*args: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        run(*args)
    assert "\n" not in caught.value.message
    return caught.value


def attempt(*args: str) -> Command | CairnError:
    try:
        return run(*args)
    except CairnError as error:
        return error


WORD = st.sampled_from(["x", "a b", "3", "-1", "-", "- item", "", "ä=1"])
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "--from": WORD.map(lambda word: [word]),
        "--max-tokens": st.integers(-5, 5).map(lambda number: [str(number)]),
        "--kind": st.sampled_from([["a"], ["b-c"]]),
        "--stop": st.lists(WORD, max_size=3),
        "--sizes": st.lists(st.integers(-5, 5).map(str), max_size=3),
        "--pair": st.tuples(st.integers(-5, 5).map(str), st.floats(0, 9).map(str)).map(list),
        "--out": st.sampled_from([["a/b"], ["None"], ["."]]),
        "--json": st.just([]),
        "--no-json": st.just([]),
        "--nested.rate": st.floats(-9, 9).map(lambda number: [str(number)]),
        "--nested.no-fused": st.just([]),
    },
)


@given(st.lists(WORD, min_size=1, max_size=3), OPTIONS)
def test_a_command_line_means_what_tyro_takes_it_for(words, options):
    args = [*words, *(word for name, values in options.items() for word in (name, *values))]
    assert run(*args) == tyro.cli(Command, args=args)


def test_every_flag_of_the_help_is_known_and_no_other(capsys):
    with pytest.raises(SystemExit) as left:
        run("--help")
    assert left.value.code == 0
    shown = set(re.findall(r"(?<![\w-])--?[a-z][\w.-]*", capsys.readouterr().out))
    shown -= {"-h", "--help"}
    for name in shown:
        assert "unknown flag" not in str(attempt("model", name, "1", "1"))
    flags = {f"--{leaf.key.replace('_', '-')}" for leaf in leaves(Command) if not leaf.positional}
    assert flags <= shown


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        (("m", "--max_tokens=3"), "max_tokens", 3),
        (("m", "-n", "3"), "max_tokens", 3),
        (("m", "--max-tokens", "3", "--max-tokens", "4"), "max_tokens", 4),
        (("--stop", "a", "--stop", "b", "c", "--", "m"), "stop", ["a", "b", "c"]),
        (("m", "--stop"), "stop", []),
        (("m", "--stop=--json"), "stop", ["--json"]),
        (("m", "--json", "--no-json"), "json", False),
        (("--json", "m", "p"), "prompts", ["p"]),
        (("m", "--", "--json", "--"), "prompts", ["--json", "--"]),
        (("m", "--from", "-1.5s"), "begin", "-1.5s"),
        (("m", "--from=a=b\nc"), "begin", "a=b\nc"),
        (("m", "--pair=1", "2"), "pair", (1, 2.0)),
        (("m", "--nested.no-fused"), "nested", Nested(fused=False)),
    ],
)
def test_forms_of_flags(args, field, value):
    assert getattr(run(*args), field) == value


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (("m", "--max-tokns", "3"), "unknown flag '--max-tokns' (value '3')", "'--max-tokens'?"),
        (("m", "--max-tokns=3"), "unknown flag '--max-tokns' (value '3')", "'--max-tokens'?"),
        (("m", "--max"), "unknown flag '--max'", "did you mean '--max-tokens'?"),
        (
            ("m", "--rate", "1"),
            "unknown flag '--rate' (value '1')",
            "did you mean '--nested.rate'?",
        ),
        (("m", "-x"), "unknown flag '-x'", "`cairn command --help` lists the flags"),
        (("m", "--model", "x"), "unknown flag '--model' (value 'x')", "lists the flags"),
        (("m", "--max-tokens"), "--max-tokens needs a value", None),
        (("m", "--max-tokens", "--json"), "--max-tokens needs a value", "--max-tokens=--json"),
        (("m", "--from", "--", "x"), "--from needs a value", "begins with a dash"),
        (("m", "--pair", "1"), "--pair needs 2 values, got 1", None),
        (("m", "--json=yes"), "--json takes no value, got 'yes'", "write --json or --no-json"),
        (("m", "--nested.fused=1"), "takes no value", "--nested.fused or --nested.no-fused"),
        (("m", "-n", "many"), "max_tokens: expected an integer, got 'many' (flag -n)", "--help"),
        (("m", "--kind", "c"), "kind: expected 'a' or 'b-c', got 'c' (flag --kind)", "--help"),
        (("m", "--kind", "bc"), "kind: expected 'a' or 'b-c', got 'bc'", "did you mean 'b-c'?"),
        (
            ("m", "--sizes", "1", "x"),
            "sizes: expected a list, each an integer, got ['1', 'x']",
            "--",
        ),
        ((), "MODEL is missing", "write `cairn command MODEL ...`"),
        (("--stop", "a", "m"), "MODEL is missing", "CAIRN_COMMAND_MODEL"),
    ],
)
def test_a_mistake_on_the_command_line(args, message, hint):
    error = failure(*args)
    assert message in error.message
    assert error.hint is None if hint is None else hint in error.hint


def test_a_positional_argument_may_be_a_flag_as_well():
    class Look(msgspec.Struct, frozen=True):
        id: tyro.conf.Positional[str]
        url: Annotated[str, tyro.conf.Positional, AlsoFlag("--url")] = "here"

    def look(*args):
        return load(Look, args=list(args), env_prefix="CAIRN_LOOK_", env={}).value.url

    assert (look("x"), look("x", "there"), look("x", "--url", "there")) == (
        "here",
        "there",
        "there",
    )
    assert look("--url=there", "x") == "there"
    with pytest.raises(UsageError, match="unexpected argument 'there'"):
        look("x", "there", "--url", "elsewhere")


def test_a_command_without_arguments_refuses_them():
    class Bare(msgspec.Struct):
        json: bool = False

    class One(msgspec.Struct):
        path: tyro.conf.Positional[str] = "."

    with pytest.raises(UsageError) as caught:
        load(Bare, args=["x"], env_prefix="CAIRN_BARE_", env={})
    assert caught.value.message == "unexpected argument 'x'"
    assert caught.value.hint == "`cairn bare` takes flags only; see `cairn bare --help`"
    with pytest.raises(UsageError) as caught:
        load(One, args=["x", "y"], env_prefix="CAIRN_ONE_", env={})
    assert caught.value.message == "unexpected argument 'y'"
    assert caught.value.hint == "`cairn one` takes PATH; quote text that has spaces"

    class Two(One):
        prompt: str = ""

    with pytest.raises(UsageError) as caught:
        load(Two, args=["x", "y"], env_prefix="CAIRN_TWO_", env={})
    assert caught.value.hint == "`cairn two` takes PATH; a text goes behind --prompt, in quotes"


def test_only_the_last_positional_argument_can_be_a_list():
    class Wrong(msgspec.Struct):
        many: tyro.conf.Positional[list[str]]
        one: tyro.conf.Positional[str]

    with pytest.raises(TypeError, match="only the last positional"):
        load(Wrong, args=[], env_prefix="X_", env={})


PIECES = [
    "--stop",
    "--json",
    "--no-json",
    "-n",
    "--pair",
    "--from=",
    "--",
    "=",
    "-",
    "--bad",
    "m",
    "1",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8))
def test_no_command_line_breaks_the_parser(args):
    args = [arg for arg in args if arg not in ("-h", "--help")]
    outcome = attempt(*args)
    assert isinstance(outcome, Command) or "\n" not in outcome.message


def test_a_usage_line_is_folded_between_flags():
    line = "\x1b[1musage:\x1b[0m cairn x [-h] FILES --out PATH [--field {None}|STR] [A ...]"
    assert usage(line, "cairn x", 30) == (
        "usage: cairn x [-h] FILES\n       --out PATH\n       [--field STR] [A ...]"
    )
