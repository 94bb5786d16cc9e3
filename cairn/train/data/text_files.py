"""Files of text: which there are, of what kind, whether they can be read at all, and their bytes unpacked.

    find_files([Path("corpus/"), Path("a.jsonl.gz")])   ->   every file, its kind and its size, checked before any work

    txt md rst     a text                 .gz   unpacked with the standard library
    jsonl          one JSON per line      .zst  needs the package zstandard
    json           the same, or one list
    parquet        a table                      needs the package pyarrow

Knows nothing about documents within the files (`documents`, `chat_files`) or about tokens.
"""

import gzip
import importlib.util
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

import msgspec

from cairn.core.errors import CairnError, DataError, UsageError

Kind = Literal["text", "jsonl", "parquet"]
Advance = Callable[[int], None]  # bytes of the file, as it lies on the disk, that were read

_KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_PACKED = (".gz", ".zst")


class TextFile(NamedTuple):
    path: Path
    kind: Kind
    bytes: int  # as it lies on the disk


def find_files(paths: Sequence[Path]) -> list[TextFile]:
    """All files, those of folders in the order of their names; refuses what is missing, empty or unknown."""
    files = [file for path in paths for file in _expand(path)]
    if not files:
        where = ", ".join(map(str, paths)) or "no paths"
        raise DataError(
            f"there are no text files in {where}",
            hint=f"known are {' '.join(_KINDS)}, also with {' and '.join(_PACKED)}",
        )
    for file in files:
        if not file.bytes:
            raise DataError(f"{file.path} is empty", hint="remove it from the list")
        _check_package(file)
    return files


def _expand(path: Path) -> list[TextFile]:
    try:
        if path.is_dir():
            inside = sorted(
                entry for entry in path.rglob("*") if kind_of(entry) and entry.is_file()
            )
            return [_file(entry) for entry in inside]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    if not path.exists():
        raise DataError(f"there is no file {path}", hint="check the path")
    return [_file(path)]


def _file(path: Path) -> TextFile:
    kind = kind_of(path)
    if kind is None:
        raise UsageError(
            f"{path} is of no known kind",
            hint=f"known are {' '.join(_KINDS)}, also with {' and '.join(_PACKED)}; rename the file",
        )
    return TextFile(path, kind, path.stat().st_size)


def kind_of(path: Path) -> Kind | None:
    """File type by name; None if it is not a text file."""
    name = path.with_suffix("") if path.suffix in _PACKED else path
    return _KINDS.get(name.suffix.lower())


def _check_package(file: TextFile) -> None:
    needed = {"parquet": "pyarrow"}.get(file.kind)
    if file.path.suffix == ".zst":
        needed = "zstandard"
    if needed and importlib.util.find_spec(needed) is None:
        raise CairnError(
            f"{file.path} cannot be read without the Python package {needed}",
            hint=f"{sys.executable} -m pip install {needed}",
        )


@contextmanager
def opened(file: TextFile, advance: Advance) -> Iterator[BinaryIO]:
    """The unpacked bytes; `advance` is called with the packed ones as they are read."""
    try:
        with file.path.open("rb") as raw:
            counted = cast(BinaryIO, _Counted(raw, advance))
            if file.path.suffix == ".gz":
                with gzip.open(counted) as stream:
                    yield cast(BinaryIO, stream)
            elif file.path.suffix == ".zst":
                import zstandard

                with zstandard.ZstdDecompressor().stream_reader(
                    counted, read_across_frames=True
                ) as stream:
                    yield cast(BinaryIO, stream)
            else:
                yield counted
    except (EOFError, gzip.BadGzipFile) as error:
        raise _broken(file.path, error) from error
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        if type(error).__name__ in ("ZstdError", "error"):  # zstandard's and zlib's own
            raise _broken(file.path, error) from error
        raise


def _broken(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is truncated or damaged: {error}", hint="copy it again")


class _Counted:
    """A file that tells how much of it was read."""

    def __init__(self, file: BinaryIO, advance: Advance) -> None:
        self._file = file
        self._advance = advance

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._advance(len(content))
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        pass  # the caller that opened it closes it

    @property
    def closed(self) -> bool:
        return self._file.closed


def lines(file: TextFile, advance: Advance, block: int = 1 << 20) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank; the end of line is taken off. Of a list, its entries, counted from 1."""
    with opened(file, advance) as stream:
        number, rest = 0, b""
        while content := stream.read(block):
            if not number and not rest:  # the beginning of the file
                content = content.removeprefix(BOM_UTF8)
            if not number and _may_be_list(file.path, rest + content):
                yield from _entries(file.path, rest + content + stream.read())
                return
            *whole, rest = (rest + content).split(b"\n")
            for line in whole:
                number += 1
                if line.strip():
                    yield number, line
        if rest.strip():
            yield number + 1, rest


def _may_be_list(path: Path, begins: bytes) -> bool:
    """Only a .json: in a .jsonl a list is a line that holds no document."""
    name = path.with_suffix("") if path.suffix in _PACKED else path
    return name.suffix.lower() == ".json" and begins.lstrip().startswith(b"[")


def _entries(path: Path, content: bytes) -> Iterator[tuple[int, bytes]]:
    """A file that is one JSON list, as chats are often published: its entries as they are written there."""
    try:
        entries = msgspec.json.decode(content, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise DataError(
            f"{path} begins as a list and is none: {error}",
            hint="a file is one JSON list, or one JSON object per line",
        ) from None
    for number, entry in enumerate(entries, start=1):
        yield number, bytes(entry)
