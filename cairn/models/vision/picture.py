"""A picture as a model takes it: decoded, resized, cut into tiles. Needs Pillow, and runs in a process of its own.

    bytes of a file -Pillow-> RGB -resize, crop, cut-> Picture: uint8 tiles and the digest of all that they depend on

Files come from strangers: sizes are bounded before anything is decoded, and only common formats are opened.
"""

import hashlib
import io
import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.core.errors import ConfigError, RequestError
from cairn.models.vision.rules import ImageRules, Layout, Size, layout_of

if TYPE_CHECKING:
    import numpy as np

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_BYTES = 20 << 20
MOST_PIXELS = 50_000_000
THINNEST = 200  # times as long as wide


class Picture(msgspec.Struct, frozen=True):
    digest: bytes  # of the pixels and the rules
    tiles: int
    height: int  # of a tile
    width: int
    pixels: bytes  # uint8 [tiles, height, width, 3]
    rows: int = 0  # of tiles; 0: the whole picture alone
    columns: int = 0

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
        said = str(problem).splitlines()[0][:120] if str(problem) else type(problem).__name__
        raise RequestError(
            f"the image cannot be read: {said}", hint=f"send one of {', '.join(FORMATS)}"
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
    """Of an image of Pillow's."""
    import numpy as np

    image = image.convert("RGB")
    _check_size(*image.size)
    width, height = image.size
    layout = layout_of(rules, height, width)
    for size in layout.resized:
        image = image.resize((size.width, size.height), rules.resample)
    tiles = _tiles(image, layout, rules)
    pixels = np.stack([np.asarray(tile, np.uint8) for tile in tiles]).tobytes()
    shape = (len(tiles), layout.tile.height, layout.tile.width, layout.rows, layout.columns)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.msgpack.encode((rules, shape)))
    digest.update(pixels)
    count, tall, wide, rows, columns = shape
    return Picture(digest.digest(), count, tall, wide, pixels, rows, columns)


def _tiles(image: Any, layout: Layout, rules: ImageRules) -> list[Any]:
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
