"""A model in this process, as the other side of a chat: no server, no port.

    messages --chat template--> token ids --engine--> text --ReasoningSplitter--> Piece, Piece, ..., Ending

The engine is the one that serves; what was said before is found in its prefix cache. Ctrl-C, or leaving the iterator,
ends the request in the engine within one step.
"""

import asyncio
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.cli.chat.chat_client import Ending, Piece
from cairn.cli.chat.chat_state import Message, Sampling
from cairn.core.errors import RequestError, UsageError
from cairn.core.garbage_collection import held_collector

if TYPE_CHECKING:
    from collections.abc import Callable

    from cairn.serve.http.chat.reasoning import Split
    from cairn.serve.stream import Stream

    Push = Callable[[str], Split]


class LocalTalker:
    def __init__(self, model: str, template: Path | None = None, **options: Any) -> None:
        """`template`: a file with the chat template to use instead of the model's."""
        # Imported late: torch takes seconds, which a chat with a server need not wait for.
        with held_collector():
            from cairn.models.chat_template import read_template
            from cairn.serve.llm import LLM

        source = None if template is None else read_template(template)
        self.model = model
        # One person talks: the graphs of many requests at once would only delay the first answer.
        options.setdefault("load_in_advance", False)
        self._llm = LLM(model, **options)
        if source is not None:
            self._llm.tokenizer.use_template(source)
        self.notes: Sequence[str] = self._llm.notes
        self._loop = asyncio.Runner()
        self._tokenizer = self._llm.tokenizer  # without one there is nothing to talk with

    def models(self) -> list[str]:
        return [self.model]

    def use(self, model: str) -> None:
        raise UsageError(
            f"this chat runs {self.model} itself", hint=f"start another: cairn chat {model}"
        )

    def answer(
        self, messages: Sequence[Message], sampling: Sampling
    ) -> Generator[Piece | Ending, None, None]:
        from msgspec.structs import replace

        from cairn.serve.http.chat.reasoning import CLOSE, OPEN, ReasoningSplitter, opened_by

        tokenizer = self._tokenizer
        prompt = tokenizer.chat(list(messages), None, True)
        marks = {tokenizer.backend.token_to_id(mark) for mark in (OPEN, CLOSE)}
        shown = not marks.isdisjoint(tokenizer.special_ids)  # else the splitter would not see them
        params = replace(sampling.params(), skip_special_tokens=not shown)
        ids = tokenizer.encode(prompt, special=False)
        try:
            stream = self._llm.stream({"prompt_token_ids": ids}, params)
        except RequestError as error:
            hint = f"{error.hint}; /undo and /clear make it shorter" if error.hint else None
            raise RequestError(error.message, hint=hint) from None
        splitter = ReasoningSplitter(opened_by(prompt))
        try:
            yield from _pieces(self._loop, stream, splitter.push)
            yield from _split(splitter.flush())
            last = stream.known.outputs[0]
            yield Ending(last.finish_reason, len(ids), len(last.token_ids))
        finally:
            self._loop.run(stream.aclose())

    def close(self) -> None:
        self._llm.close()
        self._loop.close()


def _pieces(loop: asyncio.Runner, stream: "Stream", push: "Push") -> Iterator[Piece]:
    """Each turn of the loop is a run of its own: Ctrl-C in it cancels the wait and raises here."""
    while True:
        try:
            output = loop.run(stream.__anext__())
        except StopAsyncIteration:
            return
        yield from _split(push(output.outputs[0].new_text))


def _split(split: "Split") -> Iterator[Piece]:
    if split.reasoning:
        yield Piece(split.reasoning, "reasoning")
    if split.content:
        yield Piece(split.content)
