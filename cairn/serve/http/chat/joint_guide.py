"""Guides made of other guides: one of several, or one behind a thought.

    either(calls, answer)                      a tool call, or an answer of the shape that was asked for
    after_thought(guide, tokenizer, inside)    <think> anything </think>, and then what the guide says

Each part keeps its own rules and names: they are grammars within a grammar. Knows no requests.
"""

import re

import msgspec

from cairn.models.tokenizer import Tokenizer
from cairn.serve.grammar import json_rule
from cairn.serve.guide import Guide, lark_guide, literal
from cairn.serve.http.chat.reasoning import CLOSE, OPEN
from cairn.serve.http.tools.tools import mark

ANYTHING = "/(?s:.*)/"
GAP = r"/[ \n]{0,2}/"  # between the thought and the answer
_TO_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)


def either(*guides: Guide) -> Guide:
    names = [f"way_{i}" for i in range(len(guides))]
    rules = [f"{name}: {_rule(guide)}" for name, guide in zip(names, guides, strict=True)]
    return lark_guide("\n".join([f"start: {' | '.join(names)}", *rules]), guides[0].field)


def after_thought(guide: Guide, tokenizer: Tokenizer, inside: bool) -> Guide:
    """`inside`: the prompt has opened the thought, so there is one; else the model chooses."""
    begins = "thought" if inside else f"({mark(OPEN, tokenizer)} thought)?"
    if tokenizer.backend.token_to_id(CLOSE) is not None:
        thought = f"thought: TEXT {mark(CLOSE, tokenizer)} {GAP}\nTEXT: {ANYTHING}"
    else:  # the mark is text like the thought itself: the first that comes ends it
        thought = f"thought: thinking {GAP}\nthinking[suffix={literal(CLOSE)}]: {ANYTHING}"
    return lark_guide(f"start: {begins} answer\n{thought}\nanswer: {_rule(guide)}", guide.field)


def _rule(guide: Guide) -> str:
    match guide.kind:
        case "json_schema":
            return json_rule(msgspec.json.decode(guide.text))
        case "regex":
            return f"/{_TO_ESCAPE.sub(_escaped, guide.text)}/"
        case _:
            return f"%lark {{\n{guide.text}\n}}"


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])
