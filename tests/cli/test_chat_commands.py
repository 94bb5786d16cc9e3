"""What a typed line means, and what a conversation is: for all texts, not only for polite ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.cli.chat.chat_commands import COMMANDS, Command, Draft, Say, complete, help_lines, parse
from cairn.cli.chat.chat_state import (
    KNOBS,
    Conversation,
    Sampling,
    Turn,
    dump,
    is_chat,
    with_setting,
)
from cairn.cli.chat.chat_state import parse as parse_file
from cairn.core.errors import DataError, RequestError, UsageError

TEXT = st.text(alphabet=st.characters(codec="utf-8"))


@given(TEXT)
def test_every_line_has_a_meaning_or_an_error_with_a_way_out(line):
    try:
        meant = parse(line)
    except UsageError as error:
        assert line.strip().startswith("/")
        assert error.hint  # noqa: PT017
        return
    if isinstance(meant, Command):
        assert meant.name in COMMANDS
    else:
        assert meant.text == line.strip().removeprefix("/")


@given(TEXT.filter(lambda text: text == text.strip()))
def test_everything_can_be_said(text):
    typed = f"/{text}" if text.startswith("/") else text
    assert parse(typed) == Say(text)


@given(st.sampled_from(sorted(COMMANDS)), TEXT)
def test_a_command_gets_its_argument_whole(name, argument):
    known = COMMANDS[name]
    wanted = argument.strip()
    if (known.takes == "nothing") == bool(wanted) and known.takes != "maybe":
        with pytest.raises(UsageError, match=f"/{name}"):
            parse(f"/{name} {argument}")
    else:
        assert parse(f"/{name} {argument}") == Command(name, wanted)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("/TEMPERATURE 0.5", Command("temperature", "0.5")),
        ("/max-tokens 9", Command("max_tokens", "9")),
        ("/exit", Command("quit", "")),
        ("/tokens", Command("stats", "")),
        ("/system\nbe brief\nand kind", Command("system", "be brief\nand kind")),
        ("  /undo  ", Command("undo", "")),
        ("1/2?", Say("1/2?")),
    ],
)
def test_spellings(line, meant):
    assert parse(line) == meant


def test_a_slip_is_answered_with_what_was_meant():
    with pytest.raises(UsageError, match="no command /temprature") as slip:
        parse("/temprature 1")
    assert "did you mean 'temperature'" in slip.value.hint
    assert "//temprature" in slip.value.hint


def test_completion_and_help_know_every_command():
    assert complete("/te") == ["/temperature "]
    assert complete("/") == [
        f"/{n} " if k.takes != "nothing" else f"/{n}" for n, k in COMMANDS.items()
    ]
    assert complete("te") == []
    page = "\n".join(help_lines())
    assert all(known.usage in page for known in COMMANDS.values())


LINE = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\n\r"))


@given(st.lists(LINE, min_size=1))
def test_a_block_gives_back_its_lines(lines):
    """Whatever is between the quotes, but for quotes at the end of a line, which close it."""
    lines = [line for line in lines if not line.rstrip().endswith('"""')]
    draft = Draft()
    assert not draft.feed('"""')
    assert not any(draft.feed(line) for line in lines)
    assert draft.feed('"""')
    assert draft.text == "\n".join(lines)


@given(st.lists(LINE.filter(lambda line: not line.endswith("\\")), min_size=1))
def test_a_backslash_goes_on(lines):
    draft = Draft()
    first, *rest = [line for line in lines if not line.lstrip().startswith('"""')] or [""]
    *middle, last = [first, *rest]
    assert not any(draft.feed(line + "\\") for line in middle)
    assert draft.feed(last)
    assert draft.text == "\n".join([first, *rest])


def test_a_block_on_one_line():
    draft = Draft()
    assert draft.feed('"""one line"""')
    assert draft.text == "one line"
    draft = Draft()
    assert not draft.feed('"""begins here')
    assert draft.feed('ends here"""  ')
    assert draft.text == "begins here\nends here"


# -- the conversation -----------------------------------------------------------------------------

TURNS = st.lists(
    st.builds(Turn, question=TEXT, answer=TEXT, reasoning=TEXT, finish=st.sampled_from(["stop", "length", None]))
)  # fmt: skip


@given(TURNS, st.one_of(st.none(), TEXT), TEXT)
def test_a_model_sees_alternating_roles_whatever_happened(turns, system, question):
    found = Conversation(system=system, turns=turns).messages(question)
    roles = [message["role"] for message in found]
    if system:
        assert roles.pop(0) == "system"
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    assert found[-1]["content"] == question
    assert all(message["content"] for message in found if message["role"] == "assistant")


@given(TURNS, st.one_of(st.none(), TEXT.filter(bool)), st.floats(0, 2))
def test_a_saved_chat_comes_back(turns, system, temperature):
    before = Conversation(system=system, turns=turns)
    data = dump(before, Sampling(temperature=temperature, top_k=4), "m")
    assert is_chat(data)
    after, sampling = parse_file(data, "x.json")
    assert sampling == Sampling(temperature=temperature, top_k=4)
    assert after.system == system
    assert [(t.question, t.answer, t.reasoning) for t in after.turns] == [
        (t.question, t.answer, t.reasoning) for t in turns
    ]


@given(st.binary())
def test_any_other_file_is_refused(data):
    assert not is_chat(data)
    with pytest.raises(DataError, match=r"x\.json"):
        parse_file(data, "x.json")


@pytest.mark.parametrize(
    "roles", [["assistant"], ["user", "system"], ["user", "assistant", "assistant"]]
)
def test_messages_in_a_wrong_order_are_refused(roles):
    messages = ",".join(f'{{"role": "{role}", "content": "x"}}' for role in roles)
    data = f'{{"form": "cairn chat 1", "model": "m", "sampling": {{}}, "messages": [{messages}]}}'
    with pytest.raises(DataError, match="where none belongs"):
        parse_file(data.encode(), "x.json")


def test_knobs():
    sampling = with_setting(Sampling(), "temperature", "0.25")
    assert sampling.given() == {"temperature": 0.25}
    assert with_setting(sampling, "temperature", "default").given() == {}
    assert with_setting(sampling, "top_k", "7").given() == {"temperature": 0.25, "top_k": 7}
    assert sampling.params().max_tokens is None  # an answer ends where the model says
    for name, text in [
        ("temperature", "-1"),
        ("top_p", "2"),
        ("top_k", "1.5"),
        ("seed", "x"),
        ("min_p", "nan"),
    ]:
        with pytest.raises(RequestError, match=name):
            with_setting(sampling, name, text)


@given(st.sampled_from(KNOBS), TEXT)
def test_no_value_breaks_a_knob(name, text):
    try:
        after = with_setting(Sampling(), name, text)
    except RequestError as error:
        assert name in error.message  # noqa: PT017
        return
    assert set(after.given()) <= {name}
