"""Pictures in messages, in every form that clients send them, apart from the text around them.

    {"type": "image_url", "image_url": {"url": ...}}               chat completions
    {"type": "input_image", "image_url": "..."}                    responses
    {"type": "image", "source": {"type": "base64", "data": ...}}   messages; or {"type": "url", "url": ...}
    {"type": "image", "image": bytes or an image of Pillow's}      Python
    {"type": "video_url", "video_url": {"url": ...}}               data:video/jpeg;base64,FRAME,FRAME or a GIF
    {"type": "video", "video": frames or bytes, "fps": 2}          Python

A template sees {"type": "image"} or {"type": "video"} in their place. What a picture's source is worth is judged by
its loader.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cairn.core.errors import RequestError

TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image", "image", "image_pil")
VIDEO_PARTS = ("video_url", "video")
FPS = 2.0  # frames a second, by default
DATA_URL = "data:{};base64,{}"


class ImageSource(NamedTuple):
    given: Any  # a URL, bytes, an image of Pillow's; of a video also a list of images or bytes
    where: str  # in the messages
    fps: float = 0.0  # of a video; 0: it is a picture


def has_images(messages: object) -> bool:
    """Return whether any message contains an image or video."""
    if not isinstance(messages, Sequence):
        return False
    return any(
        isinstance(part, Mapping) and part.get("type") in (*IMAGE_PARTS, *VIDEO_PARTS)
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def refuse_images(messages: object, model: str) -> None:
    """Reject images for a model without vision."""
    if has_images(messages):
        raise RequestError(
            f"a message has an image, and {model} reads text only",
            hint="use a model that sees, such as cairn-tiny-vl",
        )


def split_images(
    messages: Sequence[Mapping[str, Any]], reserved: Sequence[str]
) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Messages with {"type": "image"} in place of their pictures, and the pictures in order.

    `reserved`: placeholders, which only a template writes.
    """
    sources: list[ImageSource] = []
    split: list[dict[str, Any]] = []
    for at, message in enumerate(check_objects(messages)):
        content = message.get("content")
        where = f"messages[{at}].content"
        if isinstance(content, str):
            _check_text(content, reserved, where)
        elif isinstance(content, list):
            parts = [
                _part(part, f"{where}[{index}]", reserved, sources)
                for index, part in enumerate(content)
            ]
            message = {**message, "content": parts}
        split.append(message)
    return split, sources


def check_objects(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError("messages is not a list of objects")
    return [dict(message) for message in messages]


def with_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every content as a list of parts, which templates of models that see iterate over."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


def _part(
    part: object, where: str, reserved: Sequence[str], sources: list[ImageSource]
) -> dict[str, Any]:
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in IMAGE_PARTS:
        sources.append(ImageSource(_source(part, where), where))
        return {"type": "image"}
    if isinstance(part, Mapping) and kind in VIDEO_PARTS:
        sources.append(_video(part, where))
        return {"type": "video"}
    text = part.get("text") if isinstance(part, Mapping) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        name = repr(kind) if kind is not None else type(part).__name__
        raise RequestError(
            f"{where} is a part of type {name[:60]}",
            hint="this model reads text and images: types text and image_url (video_url, where it takes videos)",
        )
    _check_text(text, reserved, where)
    return {"type": "text", "text": text}


def _check_text(text: str, reserved: Sequence[str], where: str) -> None:
    for placeholder in reserved:
        if placeholder in text:
            raise RequestError(
                f"{where} holds {placeholder}, which stands for pictures", hint="leave it out"
            )


def _video(part: Mapping[str, Any], where: str) -> ImageSource:
    frames, fps = part.get("video"), part.get("fps", FPS)
    if frames is None:
        url = part.get("video_url")
        frames = url.get("url") if isinstance(url, Mapping) else url
    if frames is None or (isinstance(frames, list | tuple) and not frames):
        raise RequestError(
            f"{where} is a video without a source",
            hint='send {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,FRAME,FRAME"}}',
        )
    if not isinstance(fps, int | float) or not 0.01 <= fps <= 1000:
        raise RequestError(f"{where}.fps is {fps!r}", hint="frames a second, such as 2")
    return ImageSource(frames, where, float(fps))


def _source(part: Mapping[str, Any], where: str) -> Any:
    """The source from which an image is loaded."""
    for name in ("image", "image_pil"):
        if part.get(name) is not None:
            return part[name]
    source = part.get("source")
    if isinstance(source, Mapping):
        if source.get("type") == "base64":
            data, kind = source.get("data"), source.get("media_type", "image/png")
            if isinstance(data, str) and isinstance(kind, str):
                return DATA_URL.format(kind, data)
        elif isinstance(source.get("url"), str):
            return source["url"]
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if isinstance(url, str):
        return url
    raise RequestError(
        f"{where} is an image without a source",
        hint='send {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}',
    )
