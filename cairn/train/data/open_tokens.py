"""Detection of token formats by path; the only module that knows all of them.

a folder with docs.idx            token store
NAME.bin and NAME.idx             Megatron
NAME.bin with llm.c's header      llm.c
a folder of any of these          all of them, in the order of their names
"""

from pathlib import Path

from cairn.core.errors import DataError
from cairn.train.data.llmc import LlmC, is_llmc
from cairn.train.data.megatron import Megatron, is_megatron
from cairn.train.data.store import Store, is_store
from cairn.train.data.tokens import Joined, Tokens


def open_tokens(path: Path | str) -> Tokens:
    path = Path(path)
    one = _open_one(path)
    if one is not None:
        return one
    if path.is_dir():
        parts = [part for name in _candidates(path) if (part := _open_one(name)) is not None]
        if len(parts) == 1:
            return parts[0]
        if parts:
            return Joined(parts, path)
    raise _unknown(path)


def is_tokens(path: Path) -> bool:
    """Return whether a path contains tokens in a known format."""
    folders = [path, *_candidates(path)] if path.is_dir() else [path]
    return any(is_store(one) or is_megatron(one) or is_llmc(one) for one in folders)


def _open_one(path: Path) -> Tokens | None:
    if is_store(path):
        return Store(path)
    if is_megatron(path):
        return Megatron(path)
    if is_llmc(path):
        return LlmC(path)
    return None


def _candidates(folder: Path) -> list[Path]:
    """Stores and .bin files; the .idx of a pair is found through its .bin."""
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.suffix == ".bin" or (entry.is_dir() and ".unfinished" not in entry.name)
    )


def _unknown(path: Path) -> DataError:
    if not path.exists():
        return DataError(f"there is no data at {path}", hint="check the path")
    if path.suffix in (".txt", ".jsonl", ".parquet", ".gz", ".zst", ".md"):
        return DataError(
            f"{path} is text, not tokens",
            hint=f"cairn data tokenize {path} --tokenizer T --out STORE",
        )
    if path.is_dir() and not any(path.iterdir()):
        return DataError(f"{path} is an empty folder", hint="check the path")
    hint = "known are: a token store, Megatron's NAME.bin + NAME.idx, llm.c's .bin"
    return DataError(f"{path} is in no format that can be trained on", hint=hint)
