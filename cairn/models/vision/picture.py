"""A picture as a model takes it: decoded, resized, cut into tiles. Needs Pillow, and runs in a process of its own.

    bytes of a file -Pillow-> RGB -resize, crop, cut-> Picture: uint8 tiles and the digest of all that they depend on
    bytes of several, or of an animated one -frames-> the same, with a tile for each frame

Files come from strangers: sizes are bounded before anything is decoded, and only common formats are opened.
"""

import hashlib
import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.core.errors import ConfigError, RequestError
from cairn.models.vision.tiling_rules import ImageRules, Size, TileLayout, layout_of

if TYPE_CHECKING:
    import numpy as np

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_BYTES = 20 << 20
MOST_PIXELS = 50_000_000
THINNEST = 200  # times as long as wide
MOST_FRAMES = 128  # of one video
MOST_FILE_FRAMES = 4096  # of an animated file, of which some are taken
SAMPLED_FPS = 2.0  # frames a second that are taken out of an animated file
LEAST_FRAMES = 4  # that are taken, where it has so many
DEFAULT_MS = 100  # of a frame that does not say how long it is shown


class Picture(msgspec.Struct, frozen=True):
    digest: bytes  # of the pixels and the rules
    tiles: int
    height: int  # of a tile
    width: int
    pixels: bytes  # uint8 [tiles, height, width, 3]
    rows: int = 0  # of tiles; 0: the whole picture alone
    columns: int = 0
    decode_s: float = 0.0  # seconds of loading and decoding it
    frame_s: float = 0.0  # seconds from one tile to the next, which are frames; 0: it stands still

    def array(self) -> "np.ndarray":
        import numpy as np

        shape = (self.tiles, self.height, self.width, 3)
        return np.frombuffer(self.pixels, np.uint8).reshape(shape)


def pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            "pictures are decoded by Pillow, which is not installed",
            hint="pip install pillow, or cairn-stack[images]",
        ) from None
    return Image


def prepare(content: bytes, rules: ImageRules) -> Picture:
    """The picture in a file; RequestError says what is wrong with it."""
    return prepare_image(open_image(content), rules)


def open_image(content: bytes) -> Any:
    """A decoded picture in RGB, upright."""
    image_module = pillow()
    from PIL import ImageOps

    if len(content) > MOST_BYTES:
        raise RequestError(
            f"the image has {len(content)} bytes", hint=f"send at most {MOST_BYTES} bytes"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image_module.DecompressionBombWarning)
            image = image_module.open(io.BytesIO(content), formats=FORMATS)
            _check_size(*image.size)
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except RequestError:
        raise
    except MemoryError:
        raise RequestError("the image needs more memory than a picture may") from None
    except Exception as problem:  # noqa: BLE001  decoders of strangers' bytes raise anything
        reason = str(problem).splitlines()[0][:120] if str(problem) else type(problem).__name__
        reason = reason.partition(" <")[0]  # Pillow names the object that it read from
        raise RequestError(
            f"the image cannot be read: {reason}", hint=f"send one of {', '.join(FORMATS)}"
        ) from None


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise RequestError(
            f"the image has {width} x {height} pixels", hint=f"send at most {MOST_PIXELS} pixels"
        )
    if max(width, height) > THINNEST * min(width, height):
        raise RequestError(
            f"the image has {width} x {height} pixels",
            hint=f"send one that is at most {THINNEST} times as long as wide",
        )


def prepare_image(image: Any, rules: ImageRules) -> Picture:
    """Prepare an image of Pillow."""
    image = image.convert("RGB")
    _check_size(*image.size)
    width, height = image.size
    layout = layout_of(rules, height, width)
    for size in layout.resized:
        image = image.resize((size.width, size.height), rules.resample)
    return _picture(_tiles(image, layout, rules), layout, rules)


def _picture(
    tiles: Sequence[Any], layout: TileLayout, rules: ImageRules, frame_s: float = 0.0
) -> Picture:
    import numpy as np

    pixels = np.stack([np.asarray(tile, np.uint8) for tile in tiles]).tobytes()
    shape = (len(tiles), layout.tile.height, layout.tile.width, layout.rows, layout.columns)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.msgpack.encode((rules, shape, *([frame_s] if frame_s else []))))
    digest.update(pixels)
    count, tall, wide, rows, columns = shape
    return Picture(digest.digest(), count, tall, wide, pixels, rows, columns, frame_s=frame_s)


def prepare_video(contents: Sequence[bytes], rules: ImageRules, fps: float) -> Picture:
    """Prepare a video: frames sampled from an animated file, or one file for each frame at `fps`."""
    if len(contents) == 1:
        return prepare_frames(*_animation(contents[0]), rules)
    return prepare_frames([open_image(content) for content in contents], 1 / fps, rules)


def prepare_frames(images: Sequence[Any], frame_s: float, rules: ImageRules) -> Picture:
    """Prepare frames (Pillow images, `frame_s` seconds apart), all resized by the size of the first."""
    if not 1 <= len(images) <= MOST_FRAMES:
        raise RequestError(
            f"the video has {len(images)} frames", hint=f"send 1 to {MOST_FRAMES} of them"
        )
    for image in images:
        _check_size(*image.size)
    width, height = images[0].size
    layout = layout_of(rules, height, width, max(len(images), 2))
    tile = layout.tile
    if len(images) * tile.height * tile.width > MOST_PIXELS:
        raise RequestError(
            f"the video has {len(images)} frames of {tile.width} x {tile.height} pixels",
            hint=f"send fewer: at most {MOST_PIXELS} pixels together",
        )
    frames = [
        image.convert("RGB").resize((tile.width, tile.height), rules.resample) for image in images
    ]
    return _picture(frames, layout, rules, frame_s)


def _animation(content: bytes) -> tuple[list[Any], float]:
    """Frames of a GIF or WebP, about `SAMPLED_FPS` a second and evenly apart, and seconds between them."""
    image_module = pillow()
    open_image(content)  # its checks; and the first frame is whole
    try:
        image = image_module.open(io.BytesIO(content), formats=FORMATS)
        count = getattr(image, "n_frames", 1)
        if count > MOST_FILE_FRAMES:
            raise RequestError(
                f"the file has {count} frames", hint=f"send at most {MOST_FILE_FRAMES}"
            )
        shown_ms = 0.0
        for number in range(count):
            image.seek(number)
            shown_ms += image.info.get("duration") or DEFAULT_MS
        seconds = shown_ms / 1e3
        count_sampled = min(max(int(seconds * SAMPLED_FPS), LEAST_FRAMES), MOST_FRAMES, count)
        chosen = [
            round(at * (count - 1) / max(count_sampled - 1, 1)) for at in range(count_sampled)
        ]
        frames = []
        for number in chosen:
            image.seek(number)
            frames.append(image.convert("RGB"))
    except RequestError:
        raise
    except MemoryError:
        raise RequestError("the video needs more memory than it may have") from None
    except Exception as problem:  # noqa: BLE001  decoders of strangers' bytes raise anything
        raise RequestError(f"the video cannot be read: {type(problem).__name__}") from None
    step = (chosen[-1] - chosen[0]) / max(len(chosen) - 1, 1)
    return frames, max(step, 1.0) * seconds / count


def _tiles(image: Any, layout: TileLayout, rules: ImageRules) -> list[Any]:
    tile = layout.tile
    if rules.kind == "fixed":
        return [_middle(image, tile)]
    if not layout.rows:
        return [image]
    boxes = [
        (x * tile.width, y * tile.height, (x + 1) * tile.width, (y + 1) * tile.height)
        for y in range(layout.rows)
        for x in range(layout.columns)
    ]
    whole = image.resize((tile.width, tile.height), rules.resample)
    return [*(image.crop(box) for box in boxes), whole]


def _middle(image: Any, tile: Size) -> Any:
    width, height = image.size
    if (height, width) == tuple(tile):
        return image
    top, left = (height - tile.height) // 2, (width - tile.width) // 2
    return image.crop((left, top, left + tile.width, top + tile.height))
