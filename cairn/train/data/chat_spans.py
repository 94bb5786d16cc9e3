"""Character spans of the assistant's answers in a rendered chat, exact for any chat template.

A template is a program, so its text is not searched for the answer (which may occur twice, or be trimmed): it is
run again with each answer changed, and what changes is the answer.

    all turns           <|im_start|>user Hi<|im_end|> <|im_start|>assistant Hello!<|im_end|> ...
    answer -> probe 1   <|im_start|>user Hi<|im_end|> <|im_start|>assistant A...A<|im_end|> ...
    answer -> probe 2   <|im_start|>user Hi<|im_end|> <|im_start|>assistant B...B<|im_end|> ...
                                                    same before ^^^^^^  ^ same after

An answer begins where the prompt for it would end (so that reasoning and tool calls belong to it) and ends where
the renderings agree again. Where a template's history differs from its prompt (reasoning that is dropped),
the probes alone decide. Knows nothing about tokens; the end-of-turn token is `chat_tokens`' to add.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from cairn.core.errors import CairnError, DataError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]  # messages, with the prompt for an answer?

# Words that no template treats specially, with different first and last letters.
_PROBES = ("Qxanswerprobexq", "Zwanswerprobewz")


class Templates(Protocol):
    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str: ...


class Span(NamedTuple):
    start: int  # first character of the answer
    stop: int  # behind its last character, before the end-of-turn token
    message: int
    closed: bool = False  # whether the end-of-turn token stands before `stop` already


class Rendered(NamedTuple):
    text: str
    spans: list[Span]


def render_with_spans(
    templates: Templates,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Rendered:
    """The whole chat as text, and where the assistant's turns that are to be learnt stand in it."""

    def render(turns: Sequence[Message], prompt: bool) -> str:
        return templates.render(turns, tools, prompt)

    text = render(messages, False)
    _check_calls(render, messages, text)
    spans: list[Span] = []
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        past, prompt = (_shared(render, messages[:at], text, ask) for ask in (False, True))
        try:
            changed = [render(_with_answer(messages, at, probe), False) for probe in _PROBES]
        except (
            CairnError
        ):  # a tool's result without the call before it, which some templates refuse
            span = _whole_turn(prompt, _shared(render, messages[: at + 1], text, False), at)
        else:
            span = _locate(text, changed, past, prompt, at)
        if spans and span.start < spans[-1].stop:
            raise DataError(
                f"the chat template mixes the assistant's turns {spans[-1].message} and {at}",
                hint="use a template that writes one turn after the other",
            )
        spans.append(span)
    return Rendered(text, [span for span in spans if messages[span.message].get("weight", 1)])


def _check_calls(render: Render, messages: Sequence[Message], text: str) -> None:
    """Refuse a template that has no words for tool calls: the model would learn to say nothing in their place."""
    for at, message in enumerate(messages):
        if not message.get("tool_calls"):
            continue
        without = {name: value for name, value in message.items() if name != "tool_calls"}
        try:
            same = render([*messages[:at], without, *messages[at + 1 :]], False) == text
        except CairnError:  # a template that misses them knows them
            continue
        if same:
            raise DataError(
                f"message {at} calls tools, and the chat template leaves the calls out",
                hint="train with a tokenizer whose chat template writes tool calls",
            )


def _with_answer(messages: Sequence[Message], at: int, answer: str) -> list[Message]:
    plain = {"role": messages[at]["role"], "content": answer}
    return [*messages[:at], plain, *messages[at + 1 :]]


class Shared(NamedTuple):
    """Agreement of the rendering before an answer with the whole text."""

    characters: int  # that both begin with
    whole: bool  # whether the text goes on from that rendering


def _shared(render: Render, before: Sequence[Message], text: str, prompt: bool) -> Shared:
    try:
        rendered = render(before, prompt) if before else ""
    except CairnError:
        return Shared(0, False)  # some templates refuse a conversation that stops there
    common = _common(text, rendered)
    return Shared(common, bool(before) and common == len(rendered))


def _locate(text: str, changed: Sequence[str], past: Shared, prompt: Shared, at: int) -> Span:
    one, other = changed
    before = _common(one, other)
    after = _common(one[::-1], other[::-1])
    if one == other or one[before : len(one) - after] != _PROBES[0]:
        raise _not_found(at, "leaves the assistant's answer out, or writes it more than once")
    # Where the text does not go on from the prompt: the probe's place; and where the answer itself
    # changed what comes before that place (reasoning within it), the first character that differs.
    start = prompt.characters if prompt.whole else _common(text[:before], one)
    if start < past.characters and not prompt.whole:
        raise _not_found(at, "changes what stands before an answer according to the answer")
    stop = len(text) - min(after, _common(text[::-1], one[::-1]))
    return Span(start, max(start, stop), at)  # an empty answer may share its edges with both sides


def _whole_turn(prompt: Shared, turn: Shared, at: int) -> Span:
    """Span from the end of the prompt to the end of the turn, for templates whose answer cannot be replaced."""
    if not prompt.whole or not turn.whole:
        raise _not_found(at, "takes no other answer in its place, and its history differs")
    return Span(prompt.characters, turn.characters, at, closed=True)


def _common(one: str, other: str) -> int:
    """Length of the common prefix."""
    if one == other:
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:  # halving: comparing slices is far quicker than comparing characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _not_found(at: int, why: str) -> DataError:
    return DataError(
        f"what the assistant said in message {at} cannot be found: the chat template {why}",
        hint="train with another chat template",
    )
