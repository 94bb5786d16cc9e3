"""Tokenizer of a model folder in the Hugging Face format.

tokenizer.json is the truth about ids, as transformers 5 reads it: its post-processor decides about BOS and EOS, and
add_bos_token or tokenizer_class of tokenizer_config.json change nothing. The other files give names to tokens,
say which of them end an answer, and hold the chat templates. No network, no torch.

    tokenizer.json                                       vocabulary, merges, rules
    tokenizer_config.json, special_tokens_map.json       bos_token, eos_token, ...; tokens added later
    generation_config.json, config.json                  ids that end an answer
    chat_template.jinja, additional_chat_templates/      templates; else chat_template in tokenizer_config.json
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from cairn.core.errors import ModelNotFound, TokenizerError
from cairn.models.tokenizer import SpecialTokens, Tokenizer

Config = Mapping[str, Any]

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OTHER_FORMATS = {
    "tokenizer.model": "a SentencePiece or tiktoken model",
    "tekken.json": "Mistral's own format",
    "vocab.json": "half of a vocabulary in the oldest format",
    "vocab.txt": "a WordPiece vocabulary",
}


def tokenizer_from_folder(folder: str | Path) -> Tokenizer:
    folder = Path(folder)
    backend = _read_backend(folder)
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        # The older layout; newer folders keep the file for old readers only, and it may be out of date.
        config = {**config, **read_json(folder / "special_tokens_map.json")}
    named = _named_tokens(config)
    _add_tokens(backend, config, named)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    special = SpecialTokens(
        named=named,
        bos_id=_id_of(backend, named.get("bos_token")),
        eos_ids=_eos_ids(folder, _id_of(backend, named.get("eos_token"))),
        pad_id=_id_of(backend, named.get("pad_token")),
    )
    return Tokenizer(backend, special, read_chat_templates(folder, config), source=str(folder))


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ModelNotFound(
            f"{folder} {what}", hint="give a model folder that holds tokenizer.json"
        )
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise _no_tokenizer(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library knows no narrower one
        raise TokenizerError(
            f"{path} is damaged or of an unknown kind: {error}",
            hint="download it again; files from newer models may need a newer `tokenizers` package",
        ) from error


def _no_tokenizer(folder: Path) -> TokenizerError:
    files = [
        f"{name} ({what})" for name, what in _OTHER_FORMATS.items() if (folder / name).is_file()
    ]
    files += [
        f"{path.name} (has a tokenizer inside: give the file, not the folder)"
        for path in sorted(folder.glob("*.gguf"))
    ]
    if files:
        hint = f"found {', '.join(files)}; transformers' save_pretrained turns most into tokenizer.json"
    else:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        hint = f"the folder holds {names}; copy tokenizer.json from the model's original"
    return TokenizerError(f"{folder} has no tokenizer.json", hint=hint)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an absent file is an empty one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}", hint="download it again") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds {type(content).__name__}, not an object")
    return content


def _named_tokens(config: Config) -> dict[str, str]:
    """bos_token and its like, and names that only this model has, such as image_token."""
    named = {key: _content(config[key]) for key in _NAMED if config.get(key)}
    own = {
        key: value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str)
    }
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        own |= {key: _content(value) for key, value in extra.items()}
    return named | {key: value for key, value in own.items() if key not in _NAMED and value}


def _content(token: object) -> str:
    """Tokens are written as text, or as an object with flags."""
    return token["content"] if isinstance(token, dict) and "content" in token else str(token)


def _add_tokens(backend: tokenizers.Tokenizer, config: Config, named: Mapping[str, str]) -> None:
    """Tokens that tokenizer.json lacks, or has with other flags; new ones get the next free ids."""
    present = set(backend.get_added_tokens_decoder().values())
    listed = _listed_tokens(config)
    missing = [token for token in listed if token not in present]
    existing = {token.content for token in (*present, *listed)}
    for content in dict.fromkeys((*named.values(), *_unnamed_tokens(config))):
        if content not in existing:
            missing.append(AddedToken(content, special=True, normalized=False))
    for token in missing:
        token.special = token.special or token.content in named.values()
    backend.add_tokens(missing)


def _unnamed_tokens(config: Config) -> list[str]:
    """Special tokens without a role; the second name is the older one."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    return [_content(token) for token in extra] if isinstance(extra, list) else []


def _listed_tokens(config: Config) -> list[AddedToken]:
    listed = config.get("added_tokens_decoder", {})
    try:
        by_id = sorted((int(id), token) for id, token in listed.items())
        return [
            AddedToken(
                token["content"], **{flag: bool(token[flag]) for flag in _FLAGS if flag in token}
            )
            for _, token in by_id
        ]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TokenizerError(
            f"added_tokens_decoder in tokenizer_config.json is damaged: {error!r}"
        ) from error


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _eos_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    """The tokenizer's own first, then those that the model's authors stop generation with."""
    stated = read_json(folder / "generation_config.json").get("eos_token_id")
    if stated is None and own is None:
        config = read_json(folder / "config.json")
        text_config = config.get("text_config") or {}  # of models that also see or hear
        stated = config.get("eos_token_id", text_config.get("eos_token_id"))
    ids = [own, *(stated if isinstance(stated, list) else [stated])]
    return tuple(dict.fromkeys(id for id in ids if isinstance(id, int) and id >= 0))


def read_chat_templates(folder: Path, config: Config) -> dict[str, str]:
    """Templates by name. Files of their own hide what tokenizer_config.json has."""
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if config.get("chat_template") is None:
        return {}
    templates = _by_name(config["chat_template"])
    if not templates or not all(
        isinstance(part, str) for pair in templates.items() for part in pair
    ):
        where = folder / "tokenizer_config.json"
        raise TokenizerError(
            f"chat_template in {where} is neither text nor a list of named templates"
        )
    return templates


def _by_name(chat_template: object) -> dict[Any, Any]:
    match chat_template:
        case str(template):
            return {"default": template}
        case dict(templates):
            return templates
        case list(templates):
            return {
                each.get("name"): each.get("template")
                for each in templates
                if isinstance(each, dict)
            }
    return {}
