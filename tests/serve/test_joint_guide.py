"""Guides made of guides: what they let through, and nothing else, whether or not the marks are tokens."""

import pytest
import tiny_tokenizers
from tokenizers import AddedToken

from cairn.models.tokenizer import SpecialTokens, Tokenizer
from cairn.serve.grammar import Grammars
from cairn.serve.http.chat.structure import after_thought, either
from cairn.serve.http.tools.tools import read_tools, tool_guide
from cairn.serve.structured_output import Guide, schema_guide

EOS = 0
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
JSON = schema_guide({"type": "object", "additionalProperties": False}, "a")
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module", params=[False, True], ids=["text", "tokens"])
def grammars(request):
    backend = tiny_tokenizers.byte_level()
    if request.param:
        backend.add_tokens([AddedToken("</think>", normalized=False)])
        backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    made = Grammars(Tokenizer(backend, SpecialTokens(eos_ids=(EOS,))), 450, (EOS,))
    yield made
    made.close()


def follows(grammars, guide, text):
    state = grammars.compile(guide).start()
    ids = [*grammars.tokenizer.encode(text, special=False), EOS]
    return all(state.accept(token) is None for token in ids)


def guides(tokenizer):
    calls = tool_guide(read_tools(TOOLS, "required"), "hermes", tokenizer)
    regex = Guide("regex", "[a-c\\/]+/\\d\n", "r")
    yield JSON, "{}"
    yield regex, "ab//1\n"
    yield calls, CALL
    yield either(calls, JSON), CALL
    yield either(calls, JSON, regex), "{}"
    yield either(calls, JSON, regex), "a/1\n"


def test_a_guide_begins_behind_a_thought(grammars):
    for guide, text in guides(grammars.tokenizer):
        assert follows(grammars, guide, text)
        begun = after_thought(guide, grammars.tokenizer, inside=True)
        assert follows(grammars, begun, f"hm {{</think>\n\n{text}")
        assert follows(grammars, begun, f"</think>{text}")
        assert not follows(grammars, begun, text)
        maybe = after_thought(guide, grammars.tokenizer, inside=False)
        assert follows(grammars, maybe, f"<think>\nhm {{</think>\n\n{text}")
        assert follows(grammars, maybe, text)
        assert not follows(grammars, maybe, f"x{text}")
        assert not follows(grammars, maybe, f"</think>{text}")


def test_no_other_way_is_one(grammars):
    calls = tool_guide(read_tools(TOOLS, "required"), "hermes", grammars.tokenizer)
    both = either(calls, JSON)
    assert not follows(grammars, both, CALL + "{}")
    assert not follows(grammars, both, "[]")
