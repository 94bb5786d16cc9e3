"""A tokenizer of our own: byte-level BPE learnt from texts, with the tokens and the template of a chat model.

Every byte is a token, so every text has ids and comes back as it was. Digits stand alone: 47 is two tokens,
which is what makes sums learnable. The `tokenizers` library learns the merges, on all cores.

    <|endoftext|>                 ends a document
    <|im_start|>role\\n...<|im_end|>    one message of a chat; <|im_end|> ends an answer
    <|pad|>                       fills a sample, never learnt

`save_tokenizer` writes the folder that `cairn.models.tokenizer_folder` reads. Reads no text files itself.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.core.errors import ConfigError, DataError
from cairn.models.tokenizer import SpecialTokens, Tokenizer

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT, IM_START, IM_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END, PAD)
MIN_VOCAB = 256 + len(SPECIAL)

# Words with the space before them, single digits, runs of signs, line ends with the spaces before them, spaces.
PATTERN = (
    r"(?i:'(?:[sdmt]|ll|ve|re))| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['content'] is string -%}
        {%- set content = message['content'] -%}
    {%- else -%}
        {%- set content = (message['content'] or []) | map(attribute='text') | join('') -%}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- content + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- content + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab: int, fewer: bool = False) -> Tokenizer:
    """A tokenizer with `vocab` tokens in all; texts that do not have so many to learn are refused, unless `fewer`."""
    if not MIN_VOCAB <= vocab <= 1 << 20:
        raise ConfigError(
            f"a vocabulary of {vocab} tokens is not possible",
            hint=f"the 256 bytes and {len(SPECIAL)} special tokens need {MIN_VOCAB}; usual: 4096 to 131072",
        )
    from tokenizers import trainers

    backend = _empty_backend()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=_alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_counted(texts), trainer)
    if backend.get_vocab_size() < vocab and not fewer:
        raise DataError(
            f"the texts have only {backend.get_vocab_size()} tokens to learn, not {vocab}",
            hint=f"give more text, or --vocab {backend.get_vocab_size()}",
        )
    return _finished(backend, source=f"a BPE of {backend.get_vocab_size()} tokens")


def byte_tokenizer() -> Tokenizer:
    """Tokenizer with one token per byte and the special tokens, which needs no training."""
    from tokenizers import models

    backend = _empty_backend()
    names = [*SPECIAL, *_alphabet()]
    backend.model = models.BPE({name: id for id, name in enumerate(names)}, [])
    backend.add_special_tokens(list(SPECIAL))
    return _finished(backend, source="the byte tokenizer")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of a tokenizer folder; the folder appears when it is complete."""
    if not folder.name:
        raise ConfigError(f"{folder} is the folder that this runs in", hint="name a new folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty", hint="choose another folder")
    fresh = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)  # of a process with this number that was killed
    try:
        fresh.mkdir(parents=True)
        write_tokenizer_files(tokenizer, fresh)
        if folder.exists():
            folder.rmdir()
        fresh.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"the tokenizer cannot be written to {folder}: {error.strerror}",
            hint="choose another folder",
        ) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_tokenizer_files(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and what names its special tokens, into a folder that exists."""
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.special.named,
    }
    if tokenizer.backend.encode_special_tokens:
        config["split_special_tokens"] = True
    templates = tokenizer.templates.sources
    if set(templates) == {"default"}:
        (folder / "chat_template.jinja").write_text(templates["default"], encoding="utf-8")
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    _write_json(folder / "tokenizer_config.json", config)
    if tokenizer.eos_ids:
        _write_json(folder / "generation_config.json", {"eos_token_id": list(tokenizer.eos_ids)})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _empty_backend() -> "tokenizers.Tokenizer":
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _alphabet() -> list[str]:
    """Byte-level spelling of the 256 bytes in a fixed order."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _finished(backend: "tokenizers.Tokenizer", source: str) -> Tokenizer:
    vocabulary = backend.get_vocab()
    special = SpecialTokens(
        named={"eos_token": END_OF_TEXT, "pad_token": PAD},
        bos_id=None,
        eos_ids=(vocabulary[END_OF_TEXT], vocabulary[IM_END]),
        pad_id=vocabulary[PAD],
    )
    return Tokenizer(backend, special, {"default": CHAT_TEMPLATE}, source)


def _counted(texts: Iterable[str]) -> Iterator[str]:
    empty = True
    for text in texts:
        empty = False
        yield text
    if empty:
        raise DataError("there is no text to learn a tokenizer from", hint="give files with text")
