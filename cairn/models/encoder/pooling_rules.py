"""Pooling rules from the configuration files of a sentence-embedding model.

    modules.json                       the chain: Transformer, Pooling, Dense, Normalize
    1_Pooling/config.json              mean, cls, last token, max
    config_sentence_transformers.json  texts that are put before a query or a document
    sentence_bert_config.json          the longest text

Without these files: the mean of all tokens, at length one. Reads JSON; no torch.
"""

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from cairn.core.errors import RequestError, UnsupportedModel, WeightsError

Pooling = Literal["mean", "last", "cls", "max"]
# As sentence-transformers spells them, in its old files and in its new ones.
OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
NEW_MODES = {"cls": "cls", "lasttoken": "last", "max": "max", "mean": "mean"}


class PoolingRules(msgspec.Struct, frozen=True):
    pooling: Pooling = "mean"
    normalize: bool = True  # to length one
    prompts: dict[str, str] = {}  # by name: "query", "document", ...
    default_prompt: str | None = None  # the name of the one that is used where none is asked for
    context: int | None = None  # most tokens of a text; None: what the model has positions for
    dense: tuple[str, ...] = ()  # folders of projections, in their order
    yes_no: tuple[int, int | None] | None = None  # tokens that a reranker answers with
    described: bool = False  # whether the folder says so; else these are the defaults

    def prompt(self, name: str | None) -> str:
        """The text that goes before an input."""
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            there = ", ".join(self.prompts) or "none"
            raise RequestError(f"prompt_name is {name!r}", hint=f"this model has: {there}")
        return self.prompts[name]


def read_pooling_rules(folder: Path) -> PoolingRules:
    """Read the rules of a model folder; a GGUF file or a folder without modules.json has the defaults."""
    if not (folder / "modules.json").is_file():
        return PoolingRules(context=_context(folder))
    prompts, default = _prompts(folder)
    rules = PoolingRules(
        normalize=False,
        prompts=prompts,
        default_prompt=default,
        context=_context(folder),
        described=True,
    )
    for module in _read(folder / "modules.json", list):
        rules = _with_module(rules, folder, module)
    return rules


def _with_module(rules: PoolingRules, folder: Path, module: Any) -> PoolingRules:
    kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
    replace = msgspec.structs.replace
    if kind == "Transformer":
        return rules
    if kind == "Pooling":
        return replace(rules, pooling=_pooling(folder / path / "config.json"))
    if kind == "Normalize":
        return replace(rules, normalize=True)
    if kind == "Dense":
        return replace(rules, dense=(*rules.dense, path))
    if kind == "LogitScore":
        config = _read(folder / path / "config.json", dict)
        return replace(rules, yes_no=(config["true_token_id"], config.get("false_token_id")))
    raise UnsupportedModel(
        f"{folder / 'modules.json'}: module {module.get('type')!r}",
        hint="Transformer, Pooling, Dense, Normalize and LogitScore are supported",
    )


def _pooling(path: Path) -> Any:
    config = _read(path, dict)
    if config.get("include_prompt") is False:
        raise UnsupportedModel(
            f"{path}: include_prompt is false", hint="pooling without the prompt is not supported"
        )
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or ())
    modes = [NEW_MODES.get(one, one) for one in modes]
    modes = modes or [name for field, name in OLD_MODES.items() if config.get(field)]
    if len(modes) != 1 or modes[0] not in NEW_MODES.values():
        raise UnsupportedModel(
            f"{path}: pooling {' and '.join(map(str, modes)) or 'of no kind'}",
            hint="one of mean, cls, lasttoken and max is supported",
        )
    return modes[0]


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / "config_sentence_transformers.json"
    config = _read(path, dict) if path.is_file() else {}
    prompts = {str(name): str(text) for name, text in (config.get("prompts") or {}).items()}
    return prompts, config.get("default_prompt_name")


def _context(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    length = _read(path, dict).get("max_seq_length") if path.is_file() else None
    return length if isinstance(length, int) and length > 0 else None


def _read(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {path}: {error}", hint="download it again") from None
    if not isinstance(content, kind):
        raise WeightsError(f"{path} holds {type(content).__name__}", hint="download it again")
    return content
