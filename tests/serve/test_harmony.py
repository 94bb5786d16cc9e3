"""Messages in channels: what was thought, said and called, wherever the text is cut; and their grammars."""

import itertools

import pytest
import tiny_tokenizers
from hypothesis import given
from hypothesis import strategies as st

from cairn.models.tokenizer import SpecialTokens, Tokenizer
from cairn.serve.grammar import Grammars
from cairn.serve.http.chat.harmony import MARKS, Channels
from cairn.serve.http.chat.reader import joined
from cairn.serve.http.chat.structure import Offer, after_analysis, either, final_message
from cairn.serve.http.tools.tools import format_of, read_tools, tool_guide
from cairn.serve.structured_output import schema_guide

TOOLS = [{"type": "function", "function": {"name": "f"}}]
OFFER = Offer(read_tools(TOOLS, "auto"), "harmony", True)
THOUGHT = "<|channel|>analysis<|message|>Hm < 3.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
FINAL = "<|channel|>final<|message|>Yes.\n"


def read(pieces: list[str], offer: Offer | None = OFFER) -> tuple:
    reader = Channels(offer)
    parts = [delta for piece in pieces for delta in reader.push(piece, False)]
    message = joined([*parts, *reader.push("", True)], reader.unfinished)
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
    return message.reasoning_content or "", message.content or "", calls, reader.reason("stop")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THOUGHT + FINAL, ("Hm < 3.", "Yes.\n", [], "stop")),
        (THOUGHT + FINAL + "<|return|>", ("Hm < 3.", "Yes.\n", [], "stop")),
        ("<|start|>assistant" + FINAL, ("", "Yes.\n", [], "stop")),
        (THOUGHT + CALL, ("Hm < 3.", "", [("f", '{"a": 1}')], "tool_calls")),
        (THOUGHT + CALL + "<|call|>", ("Hm < 3.", "", [("f", '{"a": 1}')], "tool_calls")),
        (
            '<|start|>assistant to=functions.f<|channel|>commentary<|message|>{"a": 1}<|call|>',
            ("", "", [("f", '{"a": 1}')], "tool_calls"),
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL,
            ("", "I look.", [("f", '{"a": 1}')], "tool_calls"),
        ),
        (CALL[:-1], ("", '{"a": 1', [], "tool_calls")),  # cut off: nobody could make it
        (THOUGHT + THOUGHT + FINAL, ("Hm < 3.\nHm < 3.", "Yes.\n", [], "stop")),
        ("<|channel|>analysis to=python<|message|>1+1", ("1+1", "", [], "stop")),
        ("no channels <| at all", ("", "no channels <| at all", [], "stop")),
        ("long " * 90, ("", "long " * 90, [], "stop")),
        ("", ("", "", [], "stop")),
    ],
)
def test_a_whole_answer(text, expected):
    assert read([text]) == expected
    assert read(list(text)) == expected


def test_without_tools_a_call_is_a_thought():
    assert read([CALL], None) == ('{"a": 1}', "", [], "stop")


PIECES = (*MARKS, "<", "|", "final", "analysis", " to=functions.f ", "a")
words = st.lists(st.sampled_from(PIECES), max_size=12)


@given(words=words, cuts=st.lists(st.integers(0, 120), max_size=6))
def test_no_cut_changes_the_result(words, cuts):
    text = "".join(words)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert read(pieces) == read([text])


def test_guides_in_channels():
    assert format_of("{{ '<|channel|>analysis<|message|>' }}") == "harmony"
    backend = tiny_tokenizers.byte_level()
    backend.add_special_tokens([mark for mark in MARKS if mark != "<|end|>"])
    end = 1  # not one of the marks
    tokenizer = Tokenizer(backend, SpecialTokens(eos_ids=(end,)))
    grammars = Grammars(tokenizer, backend.get_vocab_size(), (end,))

    def follows(guide, text: str) -> bool:
        state = grammars.compile(guide).start()
        ids = [*tokenizer.encode(text, special=False), end]
        return all(state.accept(token) is None for token in ids)

    schema = schema_guide({"type": "object", "additionalProperties": False}, "a")
    answer = final_message(schema, tokenizer)
    plan = read_tools(TOOLS, "required")
    call = tool_guide(plan, "harmony", tokenizer)
    both = after_analysis(either(call, answer), tokenizer)
    final, called = "<|channel|>final<|message|>{}", CALL.replace('"a": 1', "")
    for text in (final, called, THOUGHT + final, THOUGHT + called):
        assert follows(both, text), text
    for text in ("{}", THOUGHT, FINAL, final + final, called.replace(".f", ".g")):
        assert not follows(both, text), text
    grammars.close()
