"""What shape a request demands of its answers: a grammar they have to follow, tools they may call, or none of these.

    response_format, structured_outputs, guided_*  ->  Guide  -compile->  Grammar: each answer follows it from its start
    tools, tool_choice                             ->  Offer: which tools, and how this model spells a call

A demanded call is a grammar as well. Models that think first may do so: a grammar begins behind the thought. Compiling
happens beside the event loop, before a request is let in.
"""

from typing import Literal, NamedTuple

import msgspec

from cairn.core.errors import RequestError
from cairn.models.tokenizer import Tokenizer
from cairn.serve.grammar import Grammar
from cairn.serve.guide import Guide, read_guide
from cairn.serve.http.chat.joint_guide import after_thought, either
from cairn.serve.http.chat.reasoning import CLOSE, opened_by
from cairn.serve.http.protocol.protocol_requests import ChatRequest
from cairn.serve.http.protocol.protocol_sampling import SamplingFields
from cairn.serve.http.server.service import Service
from cairn.serve.http.tools.tool_parser import ToolFormat
from cairn.serve.http.tools.tools import ToolPlan, format_of, hides_marks, read_tools, tool_guide

Thinking = Literal["no", "maybe", "begun"]  # begun: by the prompt


class Offer(NamedTuple):
    """Tools that are shown to the model."""

    plan: ToolPlan
    format: ToolFormat
    hidden: bool  # the marks of a call are special tokens, so the text has to keep them


def offer_of(service: Service, asked: ChatRequest) -> Offer | None:
    """None: no tools are shown, and calls are not looked for."""
    plan = read_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    if not plan.shown:
        return None
    templates = service.tokenizer.templates
    format = format_of(templates.sources[templates.choose(with_tools=True)])
    if format is None:
        raise RequestError(
            f"tools are given, and the chat template of {service.model} teaches no tool calls that are known here",
            hint='send tool_choice "none", or serve a model whose template has tool calls (Qwen, Llama 3, Mistral)',
        )
    return Offer(plan, format, hides_marks(format, service.tokenizer))


def thinking_of(service: Service, prompt: str) -> Thinking:
    """Of an answer to this prompt."""
    if opened_by(prompt):
        return "begun"
    taught = any(CLOSE in source for source in service.tokenizer.templates.sources.values())
    return "maybe" if taught and not prompt.rstrip().endswith(CLOSE) else "no"


async def grammar_of(
    service: Service, asked: SamplingFields, offer: Offer | None = None, thinking: Thinking = "no"
) -> Grammar | None:
    """What every answer to this request follows; None: it may say what it likes."""
    return await grammar_for(service, _guide_of(asked), offer, thinking)


async def grammar_for(
    service: Service, guide: Guide | None, offer: Offer | None, thinking: Thinking
) -> Grammar | None:
    """The same for a shape that was asked for in other words."""
    if guide is not None:  # on its own first, so that a mistake is told in its own words
        alone = await service.grammars.compiled(guide)
        if offer is None and thinking == "no":
            return alone
    if offer is not None:
        guide = _with_calls(guide, offer, service.tokenizer)
    if guide is not None and thinking != "no":
        guide = after_thought(guide, service.tokenizer, inside=thinking == "begun")
    return None if guide is None else await service.grammars.compiled(guide)


def _with_calls(guide: Guide | None, offer: Offer, tokenizer: Tokenizer) -> Guide | None:
    """A demanded call leaves no room for anything else; one that is not is an answer like the guided one."""
    if guide is None or offer.plan.choice == "required":
        return tool_guide(offer.plan, offer.format, tokenizer)
    demanded = msgspec.structs.replace(offer.plan, choice="required")
    calls = tool_guide(demanded, offer.format, tokenizer)
    return guide if calls is None else either(calls, guide)


def _guide_of(asked: SamplingFields) -> Guide | None:
    return read_guide(
        response_format=asked.response_format, structured_outputs=asked.structured_outputs,
        guided_json=asked.guided_json, guided_regex=asked.guided_regex,
        guided_choice=asked.guided_choice, guided_grammar=asked.guided_grammar,
    )  # fmt: skip
