"""The metadata that llama.cpp's converter writes for the tokenizer of a model folder, made from its tokenizer.json."""

import functools
import json
from pathlib import Path
from typing import Any

import gguf

Metadata = dict[str, Any]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_level_metadata(folder: Path, pre: str) -> Metadata:
    state = _state(folder)
    tokens, types = _tokens(state)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(state)],
    }


def sentencepiece_metadata(folder: Path, space_prefix: bool) -> Metadata:
    """Scores are minus the rank of the merge that makes a token, which is what SentencePiece's trainer gives."""
    state = _state(folder)
    tokens, types = _tokens(state)
    rank: dict[str, int] = {}
    for at, (left, right) in enumerate(_merges(state)):
        rank.setdefault(left + right, at)
    scores = [-float(rank.get(token, len(rank))) for token in tokens]
    for id, token in enumerate(tokens):
        if token == "<unk>":
            types[id] = UNKNOWN
        elif len(token) == 6 and token.startswith("<0x"):
            types[id] = BYTE
        elif types[id] == USER_DEFINED:
            tokens[id] = token.replace("▁", " ")  # these are looked for in the text as it comes
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def merges_of(folder: Path) -> list[tuple[str, str]]:
    return _merges(_state(folder))


@functools.lru_cache(maxsize=1)
def _state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))


def _tokens(state: dict[str, Any]) -> tuple[list[str], list[int]]:
    by_id = {id: token for token, id in state["model"]["vocab"].items()}
    kinds = {}
    for added in state["added_tokens"]:
        by_id[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    ids = range(max(by_id) + 1)
    return (
        [by_id.get(id, f"[PAD{id}]") for id in ids],
        [kinds.get(id, NORMAL if id in by_id else UNUSED) for id in ids],
    )


def _merges(state: dict[str, Any]) -> list[tuple[str, str]]:
    merges = state["model"]["merges"]
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]


def write(path: Path, metadata: Metadata) -> Path:
    """A GGUF file with this metadata and no tensors, by the `gguf` package."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
