"""Corpus of a recipe: its stream of samples and their tokenizer.

    stories, arithmetic, chats    made up as they are needed; without a tokenizer, a small one is trained on them
    random                        token ids without a meaning, for timing
    a path                        a token store, which brings its tokenizer; Megatron's, llm.c's or parquet files;
                                  text and jsonl, for which a small tokenizer is trained, too

Which tokenizer holds is decided here: the recipe's, else that of the weights it begins with, else the first source's
own, else a small one. Weights know their own ids only: another tokenizer's would be other words to them. A tokenizer
without a chat template gets one where chats are learnt.
"""

import itertools
from pathlib import Path
from typing import NamedTuple

from cairn.core.errors import ConfigError, did_you_mean
from cairn.models.tokenizer import Tokenizer
from cairn.train.config import Data, Validation
from cairn.train.data import procedural
from cairn.train.data.default_template import with_chat_template
from cairn.train.data.open_source import ALL, Span, is_parquet, open_blend, own_tokenizer
from cairn.train.data.open_tokens import open_tokens
from cairn.train.data.preferences import Preferences
from cairn.train.data.raw_text import holds_chats, is_raw, texts_of
from cairn.train.data.source import Source
from cairn.train.data.tokenizer_identity import id_limit, tokenizer_hash
from cairn.train.data.tokenizer_trainer import train_tokenizer
from cairn.train.random_tokens import RandomTokens


class Corpus(NamedTuple):
    source: Source
    tokenizer: Tokenizer | None  # None: ids without a meaning
    vocab: int  # ids are below it
    held_out: Source | None = None  # what is measured on and never learnt from


def open_corpus(
    data: Data,
    seed: int,
    vocab: int,
    learnt: Tokenizer | None = None,
    validation: Validation = Validation(),  # noqa: B008 (immutable)
    cache: Path | None = None,
) -> Corpus:
    """`vocab`: of the model, for ids without a meaning. `learnt`: what the weights were trained with, if they say.

    `cache`: where text that is tokenized on the way is kept.
    """
    if data.sources == ["random"]:
        held_out = RandomTokens(vocab, data.sequence, seed + 1) if validation.share else None
        return Corpus(RandomTokens(vocab, data.sequence, seed), None, vocab, held_out)
    if "random" in data.sources:
        raise ConfigError("the source random does not blend with others", hint="use it alone")
    tokenizer = choose_tokenizer(data, seed, learnt)
    if any(_is_chats(name) for name in (*data.sources, *validation.sources)):
        tokenizer = with_chat_template(tokenizer, None if learnt is None else vocab)

    def opened(names: list[str], weights: list[float], span: Span) -> Source:
        return open_blend(
            names,
            weights,
            tokenizer,
            data.sequence,
            seed,
            boundaries=data.document_mask,
            too_long=data.too_long,
            column=data.field,
            span=span,
            cache=cache,
        )

    if validation.sources:
        source = opened(data.sources, data.weights, ALL)
        held_out = opened(validation.sources, [], ALL)
    elif validation.share:
        cut = 1.0 - validation.share
        source = opened(data.sources, data.weights, (0.0, cut))
        held_out = opened(data.sources, data.weights, (cut, 1.0))
    else:
        source, held_out = opened(data.sources, data.weights, ALL), None
    return Corpus(source, tokenizer, id_limit(tokenizer), held_out)


def open_preferences(data: Data, seed: int, kind: str, learnt: Tokenizer | None) -> Corpus:
    """Open preference files; `learnt` is the tokenizer of the weights."""
    if learnt is None and data.tokenizer is None:
        raise ConfigError(
            "preferences need a model that has a tokenizer",
            hint="begin with a model.checkpoint, or name a folder with --data.tokenizer",
        )
    tokenizer = choose_tokenizer(data, seed, learnt)
    files = [Path(name) for name in data.sources]
    judged, scored = kind == "kto", kind == "reward"
    source = Preferences(files, tokenizer, data.sequence, seed, judged=judged, scored=scored)
    return Corpus(source, tokenizer, id_limit(tokenizer))


def choose_tokenizer(data: Data, seed: int, learnt: Tokenizer | None = None) -> Tokenizer:
    if data.tokenizer is not None:
        from cairn.models.tokenizer_folder import tokenizer_from_folder

        chosen = tokenizer_from_folder(data.tokenizer)
        if learnt is not None and _is_extended(chosen, learnt):
            return learnt
        _check_known(chosen, learnt)
        return chosen
    if learnt is not None:
        return learnt
    for name in data.sources:
        if (own := own_tokenizer(name)) is not None:
            return own
    made_up = tuple(name for name in data.sources if name in procedural.NAMES)
    raw = [Path(name) for name in data.sources if name not in made_up and is_raw(Path(name))]
    if len(made_up) + len(raw) < len(data.sources):
        missing = next(
            name for name in data.sources if name not in made_up and Path(name) not in raw
        )
        _check_exists(missing)
        if not is_parquet(Path(missing)):
            open_tokens(missing)  # says what it is instead, where it is no data to train on
        raise ConfigError(
            f"the source {missing!r} brings no tokenizer",
            hint="name one with --data.tokenizer FOLDER; `cairn data tokenize` makes stores that have theirs",
        )
    if not raw:
        return procedural.small_tokenizer(made_up, data.vocab, seed)
    texts = itertools.chain(texts_of(raw, data.field), procedural.first_texts(made_up, seed))
    return train_tokenizer(texts, data.vocab, fewer=True)


def _is_chats(name: str) -> bool:
    path = Path(name)
    return name == procedural.CHATS or (
        name not in procedural.NAMES and is_raw(path) and holds_chats(path)
    )


def _is_extended(chosen: Tokenizer, learnt: Tokenizer) -> bool:
    """Return whether `learnt` equals `chosen` plus a chat template that an earlier attempt of the run added."""
    if chosen.templates or not learnt.templates:
        return False
    return tokenizer_hash(with_chat_template(chosen, None)) == tokenizer_hash(learnt)


def _check_known(chosen: Tokenizer, learnt: Tokenizer | None) -> None:
    """Refuse a tokenizer whose ids mean other words than those that the weights have learnt."""
    if learnt is None or tokenizer_hash(chosen) == tokenizer_hash(learnt):
        return
    raise ConfigError(
        f"data.tokenizer {chosen.source} is not the tokenizer of the weights in {learnt.source}: "
        f"{tokenizer_hash(chosen)}, not {tokenizer_hash(learnt)}",
        hint="leave data.tokenizer out; to teach the weights other ids all the same, use a copy of their "
        "folder without tokenizer.json",
    )


def _check_exists(name: str) -> None:
    path = Path(name)
    if path.exists() or path.with_name(path.name + ".idx").exists():
        return
    make = (
        f"make it with `cairn data tokenize FILES --tokenizer FOLDER --out {name}`, "
        "or name others with --data.sources"
    )
    hint = did_you_mean(name, (*procedural.NAMES, "random"), otherwise=make)
    raise ConfigError(f"there is no data at {name!r}", hint=hint)
