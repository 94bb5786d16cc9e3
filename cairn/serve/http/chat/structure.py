"""Output structure of a request: a grammar, tools, or none.

    response_format, structured_outputs, guided_*  ->  Guide  -compile->  Grammar: each answer follows it from its start
    tools, tool_choice                             ->  Offer: which tools, and how this model spells a call

A demanded call is a grammar as well. Models that think first may do so: a grammar begins behind the thought. Compiling
happens beside the event loop, before a request is admitted.

    either(calls, answer)                      a tool call, or an answer of the shape that was asked for
    after_thought(guide, tokenizer, inside)    <think> ... </think>, and then what the guide allows
    after_analysis(final_message(guide, ..))   the same in Harmony's channels

Each part of such a joint guide keeps its own rules and names: they are grammars within a grammar.
"""

import re
from typing import Literal, NamedTuple

import msgspec

from cairn.models.tokenizer import Tokenizer
from cairn.serve.gbnf import lark_of
from cairn.serve.grammar import Grammar, json_rule
from cairn.serve.http.chat.conversation import templates_of
from cairn.serve.http.chat.reasoning import CLOSE, OPEN, opened_by
from cairn.serve.http.protocol.requests import ChatRequest
from cairn.serve.http.protocol.sampling import SamplingFields
from cairn.serve.http.server.service import Service
from cairn.serve.http.tools.tool_parser import ToolFormat
from cairn.serve.http.tools.tools import (
    CHANNEL,
    ToolPlan,
    format_for,
    hides_marks,
    mark,
    read_tools,
    tool_guide,
)
from cairn.serve.structured_output import Guide, lark_guide, literal, read_guide

# begun: by the prompt. channels: what is thought and what is said are messages of Harmony.
Thinking = Literal["no", "maybe", "begun", "channels"]
ANYTHING = "/(?s:.*)/"
GAP = r"/[ \n]{0,2}/"  # between the thought and the answer
_TO_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)


class Offer(NamedTuple):
    """Tools that are shown to the model."""

    plan: ToolPlan
    format: ToolFormat
    hidden: bool  # the marks of a call are special tokens, so the text has to keep them


def offer_of(service: Service, payload: ChatRequest) -> Offer | None:
    """Tools offered to the model; None if none are shown and calls are not parsed."""
    plan = read_tools(payload.tools, payload.tool_choice, payload.parallel_tool_calls)
    if not plan.shown:
        return None
    format = format_for(templates_of(service, payload))
    return Offer(plan, format, hides_marks(format, service.tokenizer))


def thinking_of(service: Service, prompt: str) -> Thinking:
    """Reasoning mode of an answer to this prompt."""
    if any(CHANNEL in source for source in service.tokenizer.templates.sources.values()):
        return "channels"
    if opened_by(prompt):
        return "begun"
    taught = any(CLOSE in source for source in service.tokenizer.templates.sources.values())
    return "maybe" if taught and not prompt.rstrip().endswith(CLOSE) else "no"


async def grammar_for(
    service: Service, guide: Guide | None, offer: Offer | None = None, thinking: Thinking = "no"
) -> Grammar | None:
    """Grammar of all answers to this request; None for free text."""
    if guide is not None:  # on its own first, so that an error is about the guide that was sent
        alone = await service.serving.grammars.compiled(guide)
        if offer is None and thinking == "no":
            return alone
    if guide is not None and thinking == "channels":
        guide = final_message(guide, service.tokenizer)
    if offer is not None:
        guide = _with_calls(guide, offer, service.tokenizer)
    if guide is not None and thinking == "channels":
        guide = after_analysis(guide, service.tokenizer)
    elif guide is not None and thinking != "no":
        guide = after_thought(guide, service.tokenizer, inside=thinking == "begun")
    return None if guide is None else await service.serving.grammars.compiled(guide)


def _with_calls(guide: Guide | None, offer: Offer, tokenizer: Tokenizer) -> Guide | None:
    """A demanded call leaves no room for anything else; one that is not is an answer like the guided one."""
    if guide is None or offer.plan.choice == "required":
        return tool_guide(offer.plan, offer.format, tokenizer)
    demanded = msgspec.structs.replace(offer.plan, choice="required")
    calls = tool_guide(demanded, offer.format, tokenizer)
    return guide if calls is None else either(calls, guide)


def guide_of(payload: SamplingFields) -> Guide | None:
    """The shape that the fields of a request ask for."""
    return read_guide(
        response_format=payload.response_format,
        structured_outputs=payload.structured_outputs,
        guided_json=payload.guided_json,
        guided_regex=payload.guided_regex,
        guided_choice=payload.guided_choice,
        guided_grammar=payload.guided_grammar,
        grammar=payload.grammar or None,
        json_schema=payload.json_schema,
    )


# -- joint guides ---------------------------------------------------------------------------------


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


def final_message(guide: Guide, tokenizer: Tokenizer) -> Guide:
    """Harmony grammar: the guide in a message of the channel `final`."""
    opens = f'{mark(CHANNEL, tokenizer)} "final" {mark("<|message|>", tokenizer)}'
    return lark_guide(f"start: {opens} answer\nanswer: {_rule(guide)}", guide.field)


def after_analysis(guide: Guide, tokenizer: Tokenizer) -> Guide:
    """Harmony grammar: messages after an optional one of the channel `analysis`."""
    opens, message, end, start = (
        mark(f"<|{name}|>", tokenizer) for name in ("channel", "message", "end", "start")
    )
    thought = f'thought: {opens} "analysis" {message} TEXT {end} {start} "assistant"'
    rules = [f"start: thought? answer\n{thought}\nTEXT: {ANYTHING}", f"answer: {_rule(guide)}"]
    return lark_guide("\n".join(rules), guide.field)


def _rule(guide: Guide) -> str:
    match guide.kind:
        case "json_schema":
            return json_rule(msgspec.json.decode(guide.text))
        case "regex":
            return f"/{_TO_ESCAPE.sub(_escaped, guide.text)}/"
        case "gbnf":
            return f"%lark {{\n{lark_of(guide.text, guide.field)}\n}}"
        case _:
            return f"%lark {{\n{guide.text}\n}}"


def _escaped(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])
