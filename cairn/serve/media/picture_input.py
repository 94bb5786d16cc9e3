"""Image input: conversion of messages to a prompt with placeholders and its images.

messages -split_images-> text parts and sources -load, decode-> pictures -template, expand-> prompt
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from cairn.core.errors import RequestError
from cairn.models.runnable import OpenModel
from cairn.models.vision.conversation import ImageSource, split_images
from cairn.models.vision.picture import Picture, prepare_frames, prepare_image
from cairn.models.vision.prompt import Placeholders, placeholders_of
from cairn.models.vision.tiling_rules import ImageRules
from cairn.serve.engine.media import pieces_of
from cairn.serve.engine.pieces import Piece
from cairn.serve.media.decoder import DecodingBudget, ImageDecoder
from cairn.serve.media.fetch import MediaLoader

MOST_PICTURES = 64  # of one request
THREADS = 4
Render = Callable[[Sequence[Mapping[str, Any]]], str]


class PictureInput:
    """May be used from any thread."""

    def __init__(
        self, rules: ImageRules, placeholders: Placeholders, video_rules: ImageRules | None = None
    ) -> None:
        """`video_rules`: of a model that takes videos."""
        self.rules, self.placeholders, self.video_rules = rules, placeholders, video_rules
        self.decoder, self.loader = ImageDecoder(), MediaLoader()
        # Of its own: slow pictures must not keep other requests, or the end of the server, waiting.
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="cairn pictures")

    def read(
        self, messages: Sequence[Mapping[str, Any]], render: Render
    ) -> tuple[str, list[Picture]]:
        """The text of a conversation with its placeholders, and its pictures. Waits for their decoding."""
        split, sources = self._split(messages)
        pictures = [self._timed(source) for source in sources]
        return self.placeholders.expanded(render(split), pictures), pictures

    async def read_in_turns(
        self, messages: Sequence[Mapping[str, Any]], render: Render, budget: DecodingBudget
    ) -> tuple[str, list[Picture]]:
        """`read` for a server: each picture queues anew, so that a request with many lets others pass between two."""
        run = partial(asyncio.get_running_loop().run_in_executor, self.pool)
        split, sources = await asyncio.to_thread(self._split, messages)
        pictures = [await run(self._timed, source, budget) for source in sources]

        def expanded() -> str:
            return self.placeholders.expanded(render(split), pictures)

        return await asyncio.to_thread(expanded), pictures

    def pieces(self, prompt: Sequence[int], pictures: Sequence[Picture]) -> list[Piece]:
        """Pieces of the prompt for the embedding rows of its images."""
        if not pictures:
            return []
        spans = self.placeholders.spans(prompt, pictures)
        return pieces_of(pictures, spans, self.placeholders.spec)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.decoder.close()

    def _split(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[ImageSource]]:
        split, sources = split_images(messages, self.placeholders.reserved)
        if len(sources) > MOST_PICTURES:
            raise RequestError(
                f"{len(sources)} images in a request", hint=f"send at most {MOST_PICTURES}"
            )
        return split, sources

    def _timed(self, source: ImageSource, budget: DecodingBudget | None = None) -> Picture:
        began = time.monotonic()
        picture = self._video(source, budget) if source.fps else self._picture(source, budget)
        return msgspec.structs.replace(picture, decode_s=time.monotonic() - began)

    def _picture(self, source: ImageSource, budget: DecodingBudget | None = None) -> Picture:
        image = source.given
        if isinstance(image, str):
            image = self.loader.load(image, source.where)
        if isinstance(image, bytes | bytearray | memoryview):
            return self.decoder.prepare([bytes(image)], self.rules, budget=budget)
        if hasattr(image, "convert") and hasattr(image, "size"):
            return prepare_image(image, self.rules)
        raise RequestError(
            f"{source.where} is {type(image).__name__}",
            hint="give bytes, a data URL, or an image of Pillow's",
        )

    def _video(self, source: ImageSource, budget: DecodingBudget | None = None) -> Picture:
        frames, rules = source.given, self.video_rules
        if rules is None:
            raise RequestError(
                f"{source.where} is a video, and this model takes pictures only",
                hint="send its frames as images, or use a Qwen-VL",
            )
        if isinstance(frames, str):
            frames = self.loader.load_frames(frames, source.where)
        frames = [frames] if isinstance(frames, bytes | bytearray | memoryview) else list(frames)
        if all(isinstance(one, bytes | bytearray | memoryview) for one in frames):
            contents = [bytes(one) for one in frames]
            return self.decoder.prepare(contents, rules, source.fps, budget)
        if all(hasattr(one, "convert") and hasattr(one, "size") for one in frames):
            return prepare_frames(frames, 1 / source.fps, rules)
        raise RequestError(
            f"{source.where} is a video of {type(frames[0]).__name__}",
            hint="give bytes, a data URL, or a list of frames: bytes or images of Pillow's",
        )


def picture_input_of(opened: OpenModel) -> PictureInput | None:
    """Image input of a model; None for text-only models."""
    checkpoint = opened.checkpoint
    if checkpoint is None or checkpoint.vision is None or opened.tokenizer is None:
        return None
    rules = checkpoint.image_rules()
    if rules is None:
        return None
    places = placeholders_of(checkpoint.vision, opened.tokenizer)
    return PictureInput(rules, places, checkpoint.video_rules())
