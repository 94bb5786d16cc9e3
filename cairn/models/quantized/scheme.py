"""Quantization scheme of each module, read from `quantization_config` in config.json.

    quantization_of(config) -> Quantization       .scheme("model.layers.0.mlp.up_proj") -> Scheme or None

A quantisation is a list of rules, of which the first that matches a module's name counts. A method or a format that no
reader knows is refused by its name. Torch-free: `cairn plan` reads the bits of a model here.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields

Format = Literal[
    "pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "gptq", "gptq_v2", "awq", "fp8", "mxfp4", "modelopt-fp8", "modelopt-nvfp4", "gguf",
]  # fmt: skip
Match = Literal["all", "name", "part", "regex", "glob"]
Activations = Literal["float", "token", "group", "tensor"]  # as `planes.Activations`

CONFIG = "quantization_config"
GGUF = "gguf"  # the method of a file that says it by itself
FBGEMM = "fbgemm_fp8"  # of transformers, with a scale for each row: Llama-3.1-405B-FP8
# What other engines call a method by the kernel that they run it with.
ALIASES = {
    "gptq_marlin": "gptq",
    "gptq-v2": "gptq",
    "awq_marlin": "awq",
    "compressed_tensors": "compressed-tensors",
    "modelopt_fp4": "modelopt",
    "nvfp4": "modelopt",
    FBGEMM: "fp8",
}


class QuantizationScheme(msgspec.Struct, frozen=True):
    """Storage scheme of a matrix [N, K]."""

    format: Format
    bits: int = 4
    group: int = 0  # columns that share a scale; 0: all of a row
    block_rows: int = 1  # rows that share a scale; 0: all
    symmetric: bool = True
    activations: Activations = "float"

    def weight_bits(self) -> float:
        """Stored bits per weight including scales."""
        each = (
            8 if self.format in ("nvfp4-pack-quantized", "modelopt-nvfp4") or self._is_mx() else 16
        )
        zero = 0 if self.symmetric else self.bits
        return self.bits + (
            (each + zero) / self.group / max(self.block_rows, 1) if self.group else 0
        )

    def _is_mx(self) -> bool:
        return self.format in ("mxfp4", "mxfp4-pack-quantized")


class SchemeRule(msgspec.Struct, frozen=True):
    """Modules whose name matches are stored so; None: in floating point."""

    match: Match
    text: str
    scheme: QuantizationScheme | None

    def matches(self, module: str) -> bool:
        if self.match == "all":
            return True
        if self.match == "regex":
            return re.match(self.text, module) is not None
        if self.match == "part":  # a run of whole parts of the dotted name
            return f".{self.text}." in f".{module}."
        if self.match == "glob":
            return fnmatch.fnmatchcase(module, self.text) or f".{self.text}." in f".{module}."
        return module == self.text


class Quantization(msgspec.Struct, frozen=True):
    """Quantization of a checkpoint: rules that assign schemes to modules."""

    method: str  # as `--quantization` calls it
    rules: tuple[SchemeRule, ...]
    cache: bool = False  # it has scales for 8-bit keys and values

    def scheme(self, module: str) -> QuantizationScheme | None:
        return next((rule.scheme for rule in self.rules if rule.matches(module)), None)

    def bits(self) -> float:
        """Stored bits per weight of most matrices, including scales."""
        every = [rule.scheme.weight_bits() for rule in self.rules if rule.scheme is not None]
        return every[-1] if every else 16.0


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Read the quantization of a checkpoint; None for floating point."""
    stated = config.get(CONFIG) or config.get("compression_config")
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise _unsupported(f"{CONFIG} is {stated!r}, expected an object")
    fields = Fields(stated, CONFIG)
    named = fields.take("quant_method", str, "modelopt" if "quant_algo" in stated else "")
    method = ALIASES.get(named, named)
    if method not in METHODS:
        raise _unsupported(f"quantisation method {named!r}", f"supported: {', '.join(METHODS)}")
    found = METHODS[method](fields)
    for rule in found.rules:
        try:
            rule.matches("")
        except re.error as error:
            raise _unsupported(f"{CONFIG} has the pattern {rule.text!r}: {error}") from None
    return found


# -- compressed-tensors ---------------------------------------------------------------------------


def _compressed_tensors(fields: Fields) -> Quantization:
    for field, neutral in (("sparsity_config", "dense"), ("transform_config", None)):
        stated = fields.take(field, dict, {})
        if stated and stated.get("format") != neutral:
            raise _unsupported(
                f"compressed-tensors with {field} {stated!r}", "use a dense checkpoint"
            )
    common = fields.take("format", str, "dense")
    groups = fields.take("config_groups", dict, {})
    by_name: list[SchemeRule] = []
    by_class: list[SchemeRule] = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise _unsupported(f"config_groups.{name} is {group!r}, expected an object")
        inner = Fields(group, f"config_groups.{name}")
        scheme = _compressed_scheme(inner, inner.take("format", str, None) or common)
        for target in inner.take_list("targets", str, ["Linear"]):
            rules = by_class if target == "Linear" else by_name
            rules.append(_targeted(target, scheme))
    if not by_name + by_class:
        raise _unsupported(f"{CONFIG} has no config_groups")
    ignored = [_targeted(target, None) for target in fields.take_list("ignore", str, [])]
    cache = fields.take("kv_cache_scheme", dict, None) is not None
    return Quantization("compressed-tensors", (*ignored, *by_name, *by_class), cache)


def _targeted(target: str, scheme: QuantizationScheme | None) -> SchemeRule:
    if target == "Linear":
        return SchemeRule("all", "", scheme)
    if target.startswith("re:"):
        return SchemeRule("regex", target.removeprefix("re:"), scheme)
    return SchemeRule("name", target, scheme)


def _compressed_scheme(fields: Fields, form: str) -> QuantizationScheme:
    weights = Fields(fields.take("weights", dict), f"{fields.what}.weights")
    bits, kind = weights.take("num_bits", int, 8), weights.take("type", str, "int")
    if form in ("naive-quantized", "int-quantized", "float-quantized"):
        form = "float-quantized" if kind == "float" else "int-quantized"
    widths = {
        "pack-quantized": ("int", range(2, 9)),
        "int-quantized": ("int", range(2, 9)),
        "float-quantized": ("float", range(8, 9)),
        "nvfp4-pack-quantized": ("float", range(4, 5)),
        "mxfp4-pack-quantized": ("float", range(4, 5)),
    }
    if form not in widths or kind != widths[form][0] or bits not in widths[form][1]:
        raise _unsupported(
            f"compressed-tensors format {form!r} with {bits}-bit {kind} weights",
            f"supported: {', '.join(widths)}",
        )
    strategy = weights.take("strategy", str, "group" if "nvfp4" in form else "channel")
    group, rows = _shared_by(weights, strategy)
    symmetric = weights.take("symmetric", bool, True)
    scheme = QuantizationScheme(form, bits, group, rows, symmetric, _activations(fields))  # type: ignore[arg-type]
    expected = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}.get(form, group)
    if scheme.group != expected:
        raise _unsupported(f"{form} with groups of {scheme.group}", f"its groups have {expected}")
    return scheme


def _shared_by(weights: Fields, strategy: str) -> tuple[int, int]:
    """Columns and rows that share a scale."""
    if strategy in ("group", "tensor_group"):
        group = weights.take_positive("group_size", int, 0)
        return group, 1
    if strategy == "block":
        rows, columns = _block(weights, "block_structure")
        return columns, rows
    if strategy not in ("channel", "tensor"):
        raise _unsupported(f"{weights.what}: strategy {strategy!r}")
    return 0, 1 if strategy == "channel" else 0


def _activations(fields: Fields) -> Activations:
    stated = fields.take("input_activations", dict, None)
    if stated is None:
        return "float"
    inner = Fields(stated, f"{fields.what}.input_activations")
    if inner.take("num_bits", int, 8) != 8:
        return "float"  # 4-bit activations have no product here: more exact, and as fast as the weights are read
    strategy = inner.take("strategy", str, "tensor")
    if strategy == "tensor" and inner.config.get("dynamic", False) is False:
        return "tensor"
    return "group" if strategy == "group" else "token"


# -- the others -----------------------------------------------------------------------------------


def _gptq(fields: Fields) -> Quantization:
    stored = fields.take("checkpoint_format", str, "gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise _unsupported(f"GPTQ in the format {stored!r}", "supported: gptq, gptq_v2")
    common = _gptq_scheme(fields, stored)
    rules = []
    for pattern, changes in fields.take("dynamic", dict, {}).items():
        changed: QuantizationScheme | None = None
        if not pattern.startswith("-:"):
            own = Fields({**fields.config, **(changes or {})}, f"{CONFIG}.dynamic[{pattern!r}]")
            changed = _gptq_scheme(own, stored)
        rules.append(SchemeRule("regex", re.sub(r"^[+-]:", "", pattern), changed))
    return Quantization("gptq", (*rules, SchemeRule("all", "", common)))


def _gptq_scheme(fields: Fields, stored: str) -> QuantizationScheme:
    bits = fields.take("bits", int)
    if bits not in (2, 3, 4, 8):
        raise _unsupported(f"GPTQ with {bits} bits", "supported: 2, 3, 4 and 8")
    group, symmetric = _group_size(fields, "group_size"), fields.take("sym", bool, True)
    return QuantizationScheme(
        "gptq_v2" if stored == "gptq_v2" else "gptq", bits, group, 1, symmetric
    )


def _awq(fields: Fields) -> Quantization:
    bits = fields.take("w_bit", int, 0) or fields.take("bits", int)
    version = fields.take("version", str, "gemm").lower()
    if bits != 4 or version != "gemm":
        raise _unsupported(f"AWQ with {bits} bits, version {version!r}", "supported: 4 bits, gemm")
    key = "q_group_size" if "q_group_size" in fields.config else "group_size"
    scheme = QuantizationScheme(
        "awq", 4, _group_size(fields, key), 1, not fields.take("zero_point", bool, True)
    )
    skipped = fields.take_list("modules_to_not_convert", str, [])
    return Quantization("awq", (*_skipped(skipped), SchemeRule("all", "", scheme)))


def _fp8(fields: Fields) -> Quantization:
    static = fields.take("activation_scheme", str, "dynamic") == "static"
    rows, columns = _block(fields, "weight_block_size")
    if fields.config.get("quant_method") == FBGEMM:
        rows = 1  # each has a scale; activation_scale_ub, a bound for activations, is not needed
    activations: Activations = "tensor" if static else "group" if columns else "token"
    skipped = fields.take_list("modules_to_not_convert", str, [])
    skipped += fields.take_list("ignored_layers", str, [])
    scheme = QuantizationScheme("fp8", 8, columns, rows, True, activations)
    return Quantization("fp8", (*_skipped(skipped), SchemeRule("all", "", scheme)))


def _mxfp4(fields: Fields) -> Quantization:
    skipped = fields.take_list("modules_to_not_convert", str, [])
    return Quantization(
        "mxfp4", (*_skipped(skipped), SchemeRule("all", "", QuantizationScheme("mxfp4", 4, 32)))
    )


def _modelopt(fields: Fields) -> Quantization:
    inner = fields.take("quantization", dict, {})  # hf_quant_config.json has it one level deeper
    fields = Fields(inner, CONFIG) if inner else fields
    key = "ignore" if "ignore" in fields.config else "exclude_modules"
    rules = [SchemeRule("glob", text, None) for text in fields.take_list(key, str, [])]
    for name, layer in fields.take("quantized_layers", dict, {}).items():
        rules.append(
            SchemeRule("name", name, _modelopt_scheme(Fields(layer, f"quantized_layers.{name}")))
        )
    if fields.take("quant_algo", str, "") != "MIXED_PRECISION":
        rules.append(SchemeRule("all", "", _modelopt_scheme(fields)))
    cache = fields.take("kv_cache_quant_algo", str, "") or fields.take("kv_cache_scheme", dict, {})
    return Quantization("modelopt", tuple(rules), bool(cache))


def _modelopt_scheme(fields: Fields) -> QuantizationScheme:
    algorithm = fields.take("quant_algo", str, "")
    if algorithm == "FP8":
        return QuantizationScheme("modelopt-fp8", 8, 0, 0, True, "tensor")
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return QuantizationScheme("modelopt-fp8", 8, 0, 1, True, "token")
    group = fields.take("group_size", int, 16)
    if algorithm.startswith("NVFP4") and group == 16:
        return QuantizationScheme("modelopt-nvfp4", 4, 16)
    raise _unsupported(
        f"ModelOpt's {algorithm!r} with groups of {group}",
        "supported: FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4 with groups of 16",
    )


METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}


def _skipped(parts: list[str]) -> list[SchemeRule]:
    return [SchemeRule("part", part.strip("."), None) for part in parts]


def _group_size(fields: Fields, name: str) -> int:
    group = fields.take(name, int, -1)
    if group < 1 and group != -1:
        raise _unsupported(f"{fields.what}: {name} is {group}", "-1, or a number of columns")
    return max(group, 0)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    """Rows and columns of a block; 0, 0 where it is not given: one scale for the whole matrix."""
    block = fields.take_list(name, int, [0, 0])
    if len(block) != 2 or min(block) < 0 or (min(block) == 0) != (max(block) == 0):
        raise _unsupported(f"{fields.what}: {name} is {block}", "two numbers above 0")
    return block[0], block[1]


def _unsupported(what: str, hint: str | None = None) -> UnsupportedModel:
    return UnsupportedModel(
        what, hint=hint or "compare quantization_config with that of the original checkpoint"
    )
