"""Chats with pictures, one JSON object per line, as samples to train on: tokens, which of them are learnt, pictures.

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "?"}]},
                  {"role": "assistant", "content": "A cat."}]}

A picture is a file beside the JSON lines, or a data URL in any form that chat endpoints take; nothing is fetched. The
ids are those that the engine reads for the same messages, and only the assistant's words are learnt.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cairn.core.errors import CairnError, ConfigError, DataError
from cairn.models.chat_template import ChatTemplates
from cairn.models.checkpoint import Checkpoint
from cairn.models.vision.conversation import ImageSource, split_images, with_parts
from cairn.models.vision.picture import Picture, prepare, prepare_image
from cairn.models.vision.prompt import Placeholders, placeholders_of
from cairn.train.data.chat_files import chat_lines, read_chat
from cairn.train.data.chat_spans import Message, Rendered, render_with_spans
from cairn.train.data.chat_tokens import ChatEncoder
from cairn.train.data.text_files import TextFile


class PictureChat(NamedTuple):
    ids: np.ndarray  # int64; -2 - r: row r of the chat's pictures, which lie one behind the other
    learn: np.ndarray  # bool
    pictures: list[Picture]


class PartTemplates(NamedTuple):
    """Templates of models that see, which iterate over the parts of every message. A `Templates`."""

    templates: ChatTemplates

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        return self.templates.render(
            with_parts(messages), tools, add_generation_prompt, **variables
        )


class PictureChats:
    """Reads chats for one model that sees."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        rules, vision = checkpoint.image_rules(), checkpoint.vision
        if vision is None or rules is None:
            raise ConfigError(
                f"{checkpoint.path} sees no pictures",
                hint="begin with a model such as cairn-tiny-vl",
            )
        if vision.varies is not None:
            raise ConfigError(
                f"{vision.family} is not trained with pictures yet: {vision.varies}",
                hint="llava, pixtral, idefics3, smolvlm and mistral3 are",
            )
        self.rules, self.vision = rules, vision
        tokenizer = checkpoint.tokenizer()
        self.templates, self.encoder = PartTemplates(tokenizer.templates), ChatEncoder(tokenizer)
        self.placeholders = placeholders_of(vision, tokenizer)

    def read(self, path: Path) -> Iterator[PictureChat]:
        """Every chat of a file; the first bad line ends it with its number."""
        for where, line in chat_lines(TextFile(path, "jsonl", path.stat().st_size), lambda _: None):
            chat = read_chat(line, where)
            try:
                yield self.encode(chat.messages, path.parent)
            except CairnError as error:
                raise DataError(f"{where}: {error.message}", hint=error.hint) from None

    def encode(self, messages: Sequence[dict[str, Any]], folder: Path) -> PictureChat:
        split, sources = split_images(messages, self.placeholders.reserved)
        pictures = [self._picture(source, folder) for source in sources]
        rendered = expanded(render_with_spans(self.templates, split), self.placeholders, pictures)
        ids, learn, _ = self.encoder.encode_rendered(rendered)
        ids, row = ids.copy(), 0
        for runs in self.placeholders.spans(ids.tolist(), pictures):
            for run in runs:
                ids[run.start : run.stop] = -2 - np.arange(row, row + len(run))
                row += len(run)
        return PictureChat(ids, learn, pictures)

    def _picture(self, source: ImageSource, folder: Path) -> Picture:
        image = source.given
        if source.fps:
            raise DataError(f"{source.where} is a video", hint="train on pictures")
        if isinstance(image, str):
            image = _bytes_of(image, folder, source.where)
        return (
            prepare(image, self.rules)
            if isinstance(image, bytes)
            else prepare_image(image, self.rules)
        )


def expanded(rendered: Rendered, places: Placeholders, pictures: Sequence[Picture]) -> Rendered:
    """Expand the image placeholders and shift the answer spans accordingly."""

    def moved(at: int) -> int:
        before = rendered.text[:at]
        return len(places.expanded(before, pictures[: before.count(places.mark)]))

    spans = [one._replace(start=moved(one.start), stop=moved(one.stop)) for one in rendered.spans]
    return Rendered(places.expanded(rendered.text, pictures), spans)


def _bytes_of(reference: str, folder: Path, where: str) -> bytes:
    if reference.startswith("data:"):
        try:
            return base64.b64decode(reference.partition(",")[2], validate=True)
        except ValueError as problem:  # not base64, or not even ASCII
            raise DataError(f"{where} is a data URL that is not base64: {problem}") from None
    if "://" in reference:
        raise DataError(
            f"{where} is {reference[:80]}, and training fetches nothing",
            hint="name a file, or send a data URL",
        )
    path = folder / reference
    if not path.is_file():
        raise DataError(f"{where} names {path}, which is no file")
    return path.read_bytes()
