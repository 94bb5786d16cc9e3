"""A conversation as data: what was said, how tokens are drawn, and the file that keeps both.

    Conversation(system, [Turn(question, answer), ...])  --messages-->  what a model is asked
                                                         --dump, load-->  a JSON file in the form of a request

A question without an answer (an error, Ctrl-C before the first word) stays the last turn, so that it can be asked
again, but a model never sees it. What a model thought is kept and shown, and never sent back. Pure: no terminal, no
socket, no file.
"""

from typing import Any, Literal

import msgspec

from cairn.core.errors import DataError, RequestError, UsageError
from cairn.serve.engine.sampling_params import SamplingParams

FORM = "cairn chat 1"  # of the file
Message = dict[str, Any]


class Turn(msgspec.Struct, kw_only=True):
    question: str
    answer: str = ""
    reasoning: str = ""
    finish: str | None = None  # stop, length, or stopped: by Ctrl-C


class Conversation(msgspec.Struct, kw_only=True):
    system: str | None = None
    turns: list[Turn] = []

    def messages(self, question: str) -> list[Message]:
        """Messages so far, and the next question."""
        found: list[Message] = []
        if self.system:
            found.append({"role": "system", "content": self.system})
        for turn in self.turns:
            if turn.answer:
                found.append({"role": "user", "content": turn.question})
                found.append({"role": "assistant", "content": turn.answer})
        return [*found, {"role": "user", "content": question}]

    def take_last(self) -> Turn:
        """The last question with its answer, which are forgotten."""
        if not self.turns:
            raise UsageError("nothing has been said yet", hint="ask something first")
        return self.turns.pop()


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings; None leaves a setting to the server or to the engine's defaults."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        SamplingParams(**self.given())  # refuses what makes no sense, with the range that does

    def given(self) -> dict[str, Any]:
        """Only what was set."""
        return {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None
        }

    def params(self) -> SamplingParams:
        """Sampling parameters of the local engine; an answer ends with EOS or with the context."""
        wanted: dict[str, Any] = {"max_tokens": None}
        return SamplingParams(**wanted | self.given())


KNOBS = Sampling.__struct_fields__


def readable(text: str) -> str:
    """Replace bytes that are not UTF-8, from terminals with another encoding, by �."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def with_setting(sampling: Sampling, name: str, text: str) -> Sampling:
    """Change a setting; `default` resets it."""
    value: object = None
    if text.strip().lower() not in ("default", "none", "off"):
        kind = int if name in ("top_k", "max_tokens", "seed") else float
        try:
            value = kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise RequestError(
                f"{name} is {text!r}", hint=f"it has to be {wanted}, or default"
            ) from None
    return msgspec.structs.replace(sampling, **{name: value})


# -- the file -------------------------------------------------------------------------------------


class _Saved(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str
    reasoning_content: str | None = None
    finish_reason: str | None = None


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    form: Literal["cairn chat 1"]
    model: str
    sampling: Sampling
    messages: list[_Saved]


def dump(conversation: Conversation, sampling: Sampling, model: str) -> bytes:
    messages: list[dict[str, Any]] = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn.question})
        if turn.answer or turn.reasoning:
            said: dict[str, Any] = {"role": "assistant", "content": turn.answer}
            if turn.reasoning:
                said["reasoning_content"] = turn.reasoning
            if turn.finish:
                said["finish_reason"] = turn.finish
            messages.append(said)
    whole = {"form": FORM, "model": model, "sampling": sampling.given(), "messages": messages}
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def is_chat(data: bytes) -> bool:
    """Return whether a file was written by `dump`, and may be written over."""
    try:
        msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, RequestError, UnicodeDecodeError):
        return False
    return True


def parse(data: bytes, where: str) -> tuple[Conversation, Sampling]:
    """Parse the output of `dump`; raises DataError for anything else."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, RequestError, UnicodeDecodeError) as error:
        raise DataError(f"{where} is no saved chat: {error}", hint="write one with /save") from None
    messages = file.messages
    conversation = Conversation()
    if messages and messages[0].role == "system":
        conversation.system = messages[0].content
        messages = messages[1:]
    for at, message in enumerate(messages):
        if message.role == "user":
            conversation.turns.append(Turn(question=message.content))
        elif message.role == "assistant" and at > 0 and messages[at - 1].role == "user":
            turn = conversation.turns[-1]
            turn.answer, turn.finish = message.content, message.finish_reason
            turn.reasoning = message.reasoning_content or ""
        else:
            raise DataError(
                f"{where}: message {at + 1} is of the {message.role}, where none belongs",
                hint="a question comes before each answer, and the system's message before all",
            )
    return conversation, file.sampling
