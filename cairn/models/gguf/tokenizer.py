"""Tokenizer from the metadata of a GGUF file.

Builds the `tokenizers` object that gives the same ids as the file's original. Two families: byte-level BPE ("gpt2": the
merges are in the file, the way words are cut only by name) and SentencePiece BPE ("llama": the merges follow from the
scores of the tokens). It reads no tensors and no weights; WordPiece, Unigram and RWKV vocabularies are refused.

    tokenizer.ggml.tokens, .merges or .scores, .token_type, .pre -> vocabulary, merges, rules
    tokenizer.ggml.bos_token_id, .add_bos_token, ...             -> special tokens
    tokenizer.chat_template, tokenizer.chat_template.NAME        -> templates
"""

import logging
import mmap
from collections.abc import Mapping
from enum import IntEnum
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from cairn.core.errors import ModelNotFound, TokenizerError, WeightsError
from cairn.models.gguf.pretokenizers import PreTokenizer, pretokenizer
from cairn.models.tokenizer import SpecialTokens, Tokenizer

Metadata = Mapping[str, object]
T = TypeVar("T")
D = TypeVar("D")
log = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "▁"
# Files from older converters do not say which token ends a turn; these names mean it wherever they are used.
_TURN_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>"),
    *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
)


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(path: str | Path) -> Tokenizer:
    from cairn.models.gguf.header import read_header  # brings numpy; metadata alone needs none

    path = Path(path)
    if not path.is_file():
        raise ModelNotFound(f"no GGUF file at {path}", hint="give the path of a .gguf file")
    if path.stat().st_size == 0:
        raise WeightsError(f"{path} is empty", hint="download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        metadata = read_header(path, data).metadata
    return tokenizer_from_metadata(metadata, source=str(path))


def tokenizer_from_metadata(metadata: Metadata, source: str = "this GGUF file") -> Tokenizer:
    kind = _get(metadata, "model", str, None)
    if kind is None:
        raise TokenizerError(
            f"{source} holds no tokenizer", hint="take it from the model's original folder"
        )
    if kind not in ("llama", "gpt2", "gemma4"):
        raise TokenizerError(
            f"{source} has a tokenizer of kind {kind!r}; llama (SentencePiece) and gpt2 (byte-level BPE) are supported"
        )
    tokens, types = _vocabulary(metadata)
    add_bos = True
    try:
        if kind == "gpt2":
            rule = _cutting_rule(metadata, source)
            backend, add_bos = byte_level_backend(tokens, _merges(metadata), rule), rule.add_bos
        else:
            backend = sentencepiece_backend(metadata, tokens, types)
    except TokenizerError:
        raise
    except Exception as error:  # the library knows no narrower one
        raise TokenizerError(f"the vocabulary in {source} is damaged: {error}") from error
    _mark_tokens(backend, tokens, types)
    special = _special_tokens(metadata, tokens, types)
    _set_template(backend, metadata, special, add_bos)
    return Tokenizer(backend, special, _chat_templates(metadata), source)


def _cutting_rule(metadata: Metadata, source: str) -> PreTokenizer:
    name = _get(metadata, "pre", str, None)
    if name is None:
        log.warning(
            "%s does not say how words are cut; llama.cpp's default may give other ids", source
        )
    return pretokenizer(name or "default")


def byte_level_backend(
    tokens: list[str], merges: list[tuple[str, str]], rule: PreTokenizer
) -> tokenizers.Tokenizer:
    if not merges:
        raise TokenizerError(f"{_PREFIX}merges is missing or empty")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(BPE(vocabulary, merges, ignore_merges=rule.whole_words))
    if rule.compose:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_backend(
    metadata: Metadata, tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    """Spaces become ▁, characters outside the vocabulary become byte tokens."""
    prefix = _get(metadata, "add_space_prefix", bool, _get(metadata, "model", str, "") == "llama")
    merges = _merges(metadata) or merges_by_score(tokens, types, _scores(metadata, len(tokens)))
    unknown = tokens[types.index(TokenType.UNKNOWN)] if TokenType.UNKNOWN in types else None
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    escape = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), escape]) if prefix else escape
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def merges_by_score(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """The merges that SentencePiece makes: of all neighbours that form a token, the best score first."""
    whole = {int(kind) for kind in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)}
    mergeable = {token for token, kind in zip(tokens, types, strict=True) if kind in whole}
    merges = []
    for _, token in sorted(zip(scores, tokens, strict=True), key=itemgetter(0), reverse=True):
        if token in mergeable:
            for cut in range(len(token) - 1, 0, -1):  # loops, for speed: half a million merges
                if (right := token[cut:]) in mergeable and (left := token[:cut]) in mergeable:
                    merges.append((left, right))
    return merges


def _get(metadata: Metadata, key: str, kind: type[T], default: D) -> T | D:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise TokenizerError(f"{_PREFIX}{key} is {type(value).__name__}, not {kind.__name__}")
    return value


def _vocabulary(metadata: Metadata) -> tuple[list[str], list[int]]:
    tokens = _get(metadata, "tokens", list, [])
    if not tokens:
        raise TokenizerError(
            f"{_PREFIX}tokens is missing or empty", hint="the file holds no vocabulary"
        )
    tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise TokenizerError(f"the token {twice!r} is twice in {_PREFIX}tokens")
    types = _get(metadata, "token_type", list, [int(TokenType.NORMAL)] * len(tokens))
    if len(types) != len(tokens):
        raise TokenizerError(f"{len(tokens)} tokens, but {len(types)} token types")
    return tokens, types


def _scores(metadata: Metadata, count: int) -> list[float]:
    scores = _get(metadata, "scores", list, [])
    if len(scores) != count:
        raise TokenizerError(f"{count} tokens, but {len(scores)} scores and no merges")
    return scores


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    """Each is two tokens with a space between; a token that is itself a space can only be the first."""
    merges = []
    for merge in _get(metadata, "merges", list, []):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise TokenizerError(f"{_PREFIX}merges holds {merge!r}, which is not two tokens")
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _mark_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens and user-defined ones are found whole in text, before anything is merged."""
    pairs = list(zip(tokens, types, strict=True))
    whole, user = {int(TokenType.CONTROL), int(TokenType.UNKNOWN)}, int(TokenType.USER_DEFINED)
    control = [token for token, kind in pairs if kind in whole]
    defined = [token for token, kind in pairs if kind == user]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    backend.add_tokens([AddedToken(t, normalized=False) for t in defined])


def _special_tokens(metadata: Metadata, tokens: list[str], types: list[int]) -> SpecialTokens:
    def find(key: str) -> int | None:
        id = _get(metadata, f"{key}_token_id", int, None)
        return id if id is not None and 0 <= id < len(tokens) else None

    keys = {
        "bos": "bos",
        "eos": "eos",
        "unk": "unknown",
        "pad": "padding",
        "sep": "seperator",
        "mask": "mask",
    }
    ids = {name: find(key) for name, key in keys.items()}
    named_ends = (id for id, token in enumerate(tokens) if token in _TURN_ENDS)
    ends = [ids["eos"], find("eot"), find("eom")]
    ends += [id for id in named_ends if types[id] == TokenType.CONTROL]
    return SpecialTokens(
        named={f"{name}_token": tokens[id] for name, id in ids.items() if id is not None},
        bos_id=ids["bos"],
        eos_ids=tuple(dict.fromkeys(id for id in ends if id is not None)),
        pad_id=ids["pad"],
    )


def _set_template(
    backend: tokenizers.Tokenizer, metadata: Metadata, special: SpecialTokens, add_bos: bool
) -> None:
    """Set the special tokens that `encode` adds to a text."""
    around = {"bos": None, "eos": None}
    if _get(metadata, "add_bos_token", bool, add_bos):
        around["bos"] = special.bos_id
    if _get(metadata, "add_eos_token", bool, False) and "eos_token" in special.named:
        around["eos"] = special.eos_ids[0]
    ids = [(name, id) for name, id in around.items() if id is not None]
    parts = [name for name in ("bos", "$A", "eos") if around.get(name, 0) is not None]
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)


def _chat_templates(metadata: Metadata) -> dict[str, str]:
    found = {"default": metadata.get(_TEMPLATE)}
    found |= {
        key.removeprefix(_TEMPLATE + "."): value
        for key, value in metadata.items()
        if key.startswith(_TEMPLATE + ".")
    }
    return {name: template for name, template in found.items() if isinstance(template, str)}
