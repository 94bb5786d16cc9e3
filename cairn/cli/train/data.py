"""`cairn data`: text and chats to token stores, a tokenizer of one's own, and a look into what there is.

Prints what `cairn.train.data` does, and decides nothing.
"""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import tyro

from cairn.cli.subverbs import Subverb, dispatch
from cairn.cli.train.data_report import facts, print_runs, report
from cairn.cli.train.data_sample import run_sample
from cairn.core.config import load
from cairn.core.errors import ConfigError, UsageError
from cairn.report.progress import byte_progress, progress

if TYPE_CHECKING:
    from cairn.models.tokenizer import Tokenizer
    from cairn.train.data.text_files import Advance, TextFile

ABOUT = "Training data: tokenize text and chats, train a tokenizer, look into a store, make synthetic text."

MAKE_AT_ONCE = 1000  # documents between two looks of the progress bar
MADE_UP = 5000  # documents of each kind that a tokenizer learns from

Files = Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="FILES")]
StorePath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")]


class Tokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Turn text or chats into a token store that `cairn train` reads.

    Reads .txt .md .rst, .jsonl .json and .parquet, also with .gz and .zst, and folders of them. The store is the same
    whatever the number of workers.
    """

    files: Files
    """text files, or folders of them"""
    tokenizer: str
    """a model or a folder with tokenizer.json, a .gguf file, or a store whose tokenizer to use"""
    out: Path
    """the store to write: a folder that does not exist"""
    chat: bool = False
    """the files are chats (jsonl with messages or conversations): learn what the assistant says, and nothing else"""
    field: str = "text"
    """the field of jsonl, or the column of parquet, that holds the text"""
    separator: str | None = None
    """what stands between documents in text files; without it a file is one document"""
    end_of_text: bool = True
    """end each document with the tokenizer's end-of-text token"""
    special: bool = False
    """read <|endoftext|> and its like in the text as special tokens, not as plain text"""
    longest: int | None = None
    """refuse chats of more tokens than this"""
    workers: int = 0
    """processes; 0: one for each core"""
    replace: bool = False
    """replace a store of that name"""
    json: bool = False
    """print one JSON document instead of lines"""


class Learn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Train a byte-level BPE tokenizer on text, with special tokens and a chat template."""

    files: Files
    """text files, or folders of them; or stories, arithmetic, chats: text that is made up"""
    out: Path
    """the folder to write"""
    vocab: int = 4096
    """how many tokens it shall have, special ones included"""
    field: str = "text"
    """the field of jsonl, or the column of parquet, that holds the text"""
    json: bool = False
    """print one JSON document instead of lines"""


class Info(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Say what a store (or Megatron's or llm.c's files) holds."""

    store: StorePath
    """a token store, NAME of Megatron's NAME.bin and NAME.idx, a .bin of llm.c, or a folder of these"""
    verify: bool = False
    """read every token and compare the checksums"""
    json: bool = False
    """print one JSON document instead of lines"""


class Show(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Print one document as text; of a chat, what is learnt stands out."""

    store: StorePath
    """a token store, or Megatron's or llm.c's files"""
    number: Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="[N]")] = 0
    """which document, from 0"""
    tokenizer: str | None = None
    """for formats that do not carry their tokenizer: a model or a folder with tokenizer.json"""
    json: bool = False
    """print the ids, the mask and the text as JSON"""


class Make(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Write documents that are made up by rule: endless, seeded, with right answers."""

    kind: Annotated[
        Literal["stories", "arithmetic", "chats"],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="KIND"),
    ]
    """stories, arithmetic or chats"""
    out: Path
    """the jsonl file to write"""
    documents: int = 1000
    """how many"""
    first: int = 0
    """the number of the first one; a document depends on its number and the seed only"""
    seed: int = 0
    """which of the endless books"""
    json: bool = False
    """print one JSON document instead of lines"""


def run(args: list[str]) -> int:
    return dispatch("data", ABOUT, SUBVERBS, args)


def run_tokenize(args: list[str]) -> int:
    options = load(Tokenize, args=args, env_prefix="CAIRN_DATA_TOKENIZE_").value
    from cairn.train.data.documents import Reading
    from cairn.train.data.ordered_pool import available_cores
    from cairn.train.data.text_files import find_files
    from cairn.train.data.tokenize import Options, tokenize
    from cairn.train.data.tokenize_chats import tokenize_chats

    files = find_files(options.files)
    tokenizer = _tokenizer(options.tokenizer)
    workers = options.workers or available_cores()
    began = time.monotonic()
    with byte_progress(sum(file.bytes for file in files), "tokenizing") as advance:
        if options.chat:
            done: Any = tokenize_chats(
                files,
                tokenizer,
                options.out,
                longest=options.longest,
                workers=workers,
                replace=options.replace,
                advance=advance,
            )
        else:
            done = tokenize(
                files,
                tokenizer,
                options.out,
                Options(
                    Reading(options.field, options.separator),
                    end_of_text=options.end_of_text,
                    special=options.special,
                    workers=workers,
                    replace=options.replace,
                ),
                advance,
            )
    made = {"store": str(options.out), **done._asdict(), "seconds": time.monotonic() - began}
    return report(made, options.json)


def run_tokenizer(args: list[str]) -> int:
    options = load(Learn, args=args, env_prefix="CAIRN_DATA_TOKENIZER_").value
    from cairn.train.data.documents import Reading, check_field
    from cairn.train.data.procedural import NAMES
    from cairn.train.data.text_files import find_files
    from cairn.train.data.tokenizer_identity import tokenizer_hash
    from cairn.train.data.tokenizer_trainer import save_tokenizer, train_tokenizer

    _check_new(options.out)
    made_up = [str(path) for path in options.files if str(path) in NAMES and not path.exists()]
    real = [path for path in options.files if str(path) not in made_up]
    files = find_files(real) if real else []
    for file in files:
        check_field(file, Reading(options.field))
    began = time.monotonic()
    with byte_progress(sum(file.bytes for file in files), "learning") as advance:
        texts = _read_texts(files, made_up, options.field, advance)
        tokenizer = train_tokenizer(texts, options.vocab)
    save_tokenizer(tokenizer, options.out)
    made = {
        "tokenizer": str(options.out),
        "vocab": tokenizer.vocab_size,
        "hash": tokenizer_hash(tokenizer),
        "seconds": time.monotonic() - began,
    }
    return report(made, options.json)


def _check_new(folder: Path) -> None:
    """Check before minutes of training that the result can be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty", hint="choose another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(folder.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write there")
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}", hint="choose another folder"
        ) from None


def run_info(args: list[str]) -> int:
    options = load(Info, args=args, env_prefix="CAIRN_DATA_INFO_").value
    from cairn.train.data.open_tokens import open_tokens
    from cairn.train.data.store import Store

    tokens = open_tokens(options.store)
    if options.verify:
        if not isinstance(tokens, Store):
            raise UsageError(f"{options.store} is {tokens.format}: it has no checksums to verify")
        total = sum(file.stat().st_size for file in options.store.glob("*.bin"))
        with byte_progress(total, "verifying") as advance:
            tokens.verify(advance)
    return report(facts(tokens, options.verify), options.json)


def run_show(args: list[str]) -> int:
    options = load(Show, args=args, env_prefix="CAIRN_DATA_SHOW_").value
    from cairn.train.data.open_tokens import open_tokens
    from cairn.train.data.store import Store
    from cairn.train.data.tokens import document

    tokens = open_tokens(options.store)
    ids = document(tokens, options.number)
    start = int(tokens.offsets[options.number])
    learn = tokens.mask(start, start + len(ids))
    if options.tokenizer is not None:
        tokenizer = _tokenizer(options.tokenizer)
    elif isinstance(tokens, Store):
        tokenizer = tokens.own_tokenizer()
    else:
        raise UsageError(
            f"{options.store} ({tokens.format}) does not carry its tokenizer",
            hint="name it with --tokenizer FOLDER",
        )
    text = tokenizer.decode(ids.tolist(), skip_special=False)
    if options.json:
        shown = {"document": options.number, "ids": ids.tolist(), "text": text}
        shown |= {"learn": learn.tolist()} if tokens.has_mask else {}
        print(msgspec.json.encode(shown).decode())
    elif tokens.has_mask:
        print_runs(tokenizer, ids.tolist(), learn.tolist())
    else:
        print(text)
    return 0


def run_make(args: list[str]) -> int:
    options = load(Make, args=args, env_prefix="CAIRN_DATA_MAKE_").value
    if options.documents < 1 or options.first < 0:
        raise UsageError(f"cannot make {options.documents} documents from {options.first} on")
    unfinished = options.out.with_name(options.out.name + ".unfinished")
    try:
        with (
            unfinished.open("wb") as file,
            progress(-(-options.documents // MAKE_AT_ONCE), f"making {options.kind}") as advance,
        ):
            for number in range(options.first, options.first + options.documents):
                file.write(msgspec.json.encode(_row(options.kind, options.seed, number)) + b"\n")
                if (number - options.first) % MAKE_AT_ONCE == MAKE_AT_ONCE - 1:
                    advance(f"making {options.kind}")
        unfinished.replace(options.out)
    except OSError as error:
        hint = "choose another file with --out, on a disk with room"
        raise UsageError(f"cannot write {options.out}: {error.strerror}", hint=hint) from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    if options.json:
        return report({"file": str(options.out), "documents": options.documents}, True)
    print(f"wrote {options.documents} {options.kind} to {options.out}")
    return 0


def _row(kind: str, seed: int, number: int) -> dict[str, Any]:
    """A line of a file of procedural documents; an arithmetic problem includes its parts for checking."""
    from cairn.train.data.arithmetic import problem
    from cairn.train.data.chats import chat
    from cairn.train.data.procedural import as_text

    if kind == "chats":
        return {"messages": chat(seed, number)}
    parts = problem(seed, number)._asdict() if kind == "arithmetic" else {}
    return {"text": as_text(kind, seed, number), **parts}


def _tokenizer(name: str) -> "Tokenizer":
    from cairn.models.hub import resolve
    from cairn.models.tokenizer_folder import tokenizer_from_folder
    from cairn.train.data.store import Store, is_store

    path = resolve(name)
    if path.suffix == ".gguf":
        from cairn.models.gguf.tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(path)
    return Store(path).own_tokenizer() if is_store(path) else tokenizer_from_folder(path)


def _read_texts(
    files: "list[TextFile]", made_up: list[str], field: str, advance: "Advance"
) -> Iterator[str]:
    """Training texts of a tokenizer: all documents of the files, and a few thousand procedural ones."""
    from cairn.train.data.documents import Reading, pieces
    from cairn.train.data.procedural import as_text

    for file in files:
        yield from (piece.text for piece in pieces(file, Reading(field), advance))
    for name in made_up:
        yield from (as_text(name, 0, number) for number in range(MADE_UP))
    if sys.stderr.isatty():
        sys.stderr.write("all text is read; learning merges\n")


SUBVERBS = {
    "tokenize": Subverb(run_tokenize, "text or chats to a token store"),
    "tokenizer": Subverb(run_tokenizer, "train a tokenizer on text"),
    "info": Subverb(run_info, "what a store holds"),
    "show": Subverb(run_show, "one document of a store as text"),
    "sample": Subverb(run_sample, "one sample of a run as text, as it was trained on"),
    "make": Subverb(run_make, "synthetic stories, sums and chats"),
}
