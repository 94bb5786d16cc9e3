"""The tensors of a quantised checkpoint under the names of an unquantised one.

    files --rules of quantization_config--> names() has P.weight, whichever tensors store it
                                            tensor(P.weight)          dequantised, where floats are needed
                                            planes(P.weight, device)  as it is, for a form that multiplies with it

Opening reads headers only, and refuses planes that are missing, truncated or of another group size.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from cairn.core.errors import UnsupportedModel, WeightsError
from cairn.models.quantized import awq, compressed_tensors, gptq, hf_fp8, modelopt, mxfp4
from cairn.models.quantized.planes import Planes, dequantized
from cairn.models.quantized.scheme import Format, Quantization, QuantizationScheme
from cairn.models.quantized.stored_matrix import StoredLayout, StoredMatrix, column_order
from cairn.models.safetensors_file import TensorSource

Device = torch.device | str
# Last parts of names that say something about a quantised matrix; "weight" does so beside one of them.
MARKERS = {
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale",
    "weight_scale_inv", "weight_scale_2", "input_scale", "input_zero_point", "input_global_scale",
    "activation_scale", "qweight", "qzeros", "scales", "g_idx", "pre_quant_scale",
}  # fmt: skip
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "output_scale", "prob_output_scale")
# self_attn.k_scale; of older programs self_attn.k_proj.k_scale and self_attn.k_proj.output_scale
CACHE_SCALE = re.compile(
    r"layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:[kv]_proj\.)?(?P<kind>[kv])_scale|(?P<projection>[kv])_proj\.output_scale)$"
)


@runtime_checkable
class HasPlanes(Protocol):
    """A source of tensors, some of which are quantised."""

    def planes_shape(self, name: str) -> "PlanesShape | None":
        """Shape of a tensor's planes from the headers; None if it has none."""
        ...

    def planes(self, name: str, device: Device) -> Planes: ...

    def bits(self, name: str) -> float:
        """Stored bits per weight including scales."""
        ...


class PlanesShape(NamedTuple):
    kind: str  # the format, for messages
    group: int  # columns that share a scale
    ordered: bool  # its columns have an order of their own


class MatrixReader(NamedTuple):
    layout: Callable[[StoredMatrix, QuantizationScheme], StoredLayout]
    planes: Callable[[StoredMatrix, QuantizationScheme, Device], Planes]


_EIGHT_BITS = MatrixReader(compressed_tensors.eight_bit_layout, compressed_tensors.eight_bit_planes)
_FOUR_BITS = MatrixReader(compressed_tensors.four_bit_layout, compressed_tensors.four_bit_planes)
READERS: dict[Format, MatrixReader] = {
    "pack-quantized": MatrixReader(
        compressed_tensors.packed_layout, compressed_tensors.packed_planes
    ),
    "int-quantized": _EIGHT_BITS,
    "float-quantized": _EIGHT_BITS,
    "nvfp4-pack-quantized": _FOUR_BITS,
    "mxfp4-pack-quantized": _FOUR_BITS,
    "gptq": MatrixReader(gptq.layout, gptq.planes),
    "gptq_v2": MatrixReader(gptq.layout, gptq.planes),
    "awq": MatrixReader(awq.layout, awq.planes),
    "fp8": MatrixReader(hf_fp8.layout, hf_fp8.planes),
    "modelopt-fp8": MatrixReader(modelopt.fp8_layout, modelopt.fp8_planes),
    "modelopt-nvfp4": MatrixReader(modelopt.nvfp4_layout, modelopt.nvfp4_planes),
}


class _MatrixTensors(NamedTuple):
    stored: StoredMatrix
    scheme: QuantizationScheme
    shape: tuple[int, int]


class QuantizedTensors:
    """`float_dtype`: of what `tensor` returns for a quantised matrix."""

    def __init__(
        self, files: TensorSource, quantization: Quantization, float_dtype: torch.dtype
    ) -> None:
        self.files, self.quantization, self.float_dtype = files, quantization, float_dtype
        self._matrices: dict[str, _MatrixTensors] = {}
        self._experts: dict[str, _Expert] = {}
        self._plain: list[str] = []
        self._cache_scales: dict[str, str] = {}
        for module, parts in _by_module(files.names()).items():
            self._sort(module, parts)

    def names(self) -> list[str]:
        return [*self._plain, *self._matrices, *self._experts]

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._matrices.get(name) or self._experts.get(name)
        return found.shape if found else self.files.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        quantised = name in self._matrices or name in self._experts
        return self.float_dtype if quantised else self.files.dtype(name)

    def bits(self, name: str) -> float:
        """Stored bits per weight including scales."""
        found = self._matrices.get(name)
        if found is not None:
            return found.scheme.weight_bits()
        return 4.25 if name in self._experts else 8.0 * self.files.dtype(name).itemsize

    def tensor(self, name: str) -> Tensor:
        if name in self._matrices or name in self._experts:
            return dequantized(self.planes(name, "cpu"), self.float_dtype)
        return self.files.tensor(name)

    def planes_shape(self, name: str) -> PlanesShape | None:
        found = self._matrices.get(name)
        if found is None:
            return PlanesShape("mxfp4", mxfp4.GROUP, False) if name in self._experts else None
        group = found.scheme.group or found.shape[1]
        return PlanesShape(found.scheme.format, group, _is_ordered(found.stored, group))

    def planes(self, name: str, device: Device) -> Planes:
        if name in self._experts:
            return self._experts[name].planes(self.files, device)
        matrix = self._matrices[name]
        return READERS[matrix.scheme.format].planes(matrix.stored, matrix.scheme, device)

    def cache_scales(self, layers: int) -> list[tuple[float, float]] | None:
        """Scales of an 8-bit KV cache by layer (stored = value / scale); None unless every layer has both.

        Of scales for each head the largest, which no head's values exceed.
        """
        found: dict[tuple[int, str], float] = {}
        for name, at in self._cache_scales.items():
            match = CACHE_SCALE.search(name)
            if match is not None:
                kind = match["kind"] or match["projection"]
                found[int(match["layer"]), kind] = float(self.files.tensor(at).float().max())
        every = [(found.get((i, "k")), found.get((i, "v"))) for i in range(layers)]
        known = [(k, v) for k, v in every if k is not None and v is not None]
        return known if len(known) == layers else None

    def _sort(self, module: str, parts: dict[str, str]) -> None:
        """Sort the tensors of a module into parts of a quantised matrix and plain tensors."""
        scales = {part: parts.pop(part) for part in CACHE_SCALES if part in parts}
        self._cache_scales |= {f"{module}.{part}": name for part, name in scales.items()}
        if module.endswith(".experts") and any(part.endswith("_blocks") for part in parts):
            return self._sort_experts(module, parts)
        marked = MARKERS & parts.keys()
        if not marked:
            self._plain += parts.values()
            return None
        scheme = self.quantization.scheme(module)
        if scheme is None:
            raise WeightsError(
                f"{module} has {', '.join(sorted(marked))}, and quantization_config leaves it in floating point",
                hint="config.json does not describe these weights",
            )
        if "pre_quant_scale" in marked:
            raise UnsupportedModel(
                f"{module} has pre_quant_scale, a scale of its input",
                hint="export the checkpoint with the scale folded into the norm before it",
            )
        stored = StoredMatrix(self.files, module, parts)
        layout = READERS[scheme.format].layout(stored, scheme)
        stored.check(layout)
        self._matrices[f"{module}.weight"] = _MatrixTensors(stored, scheme, layout.shape)
        self._plain += [name for part, name in parts.items() if part == "bias"]
        return None

    def _sort_experts(self, module: str, parts: dict[str, str]) -> None:
        """All experts in one tensor, as gpt-oss stores them, under the names that one expert each would have."""
        for part, (name, rows) in mxfp4.PARTS.items():
            at = f"{module}.{name}"
            shapes = [self.files.shape(f"{at}_{kind}") for kind in ("blocks", "scales")]
            count, total, columns = mxfp4.check(at, shapes[0], shapes[1])
            for expert in range(count):
                shape = (len(range(*rows.indices(total))), columns)
                self._experts[f"{module}.{expert}.{part}.weight"] = _Expert(at, expert, rows, shape)
        self._plain += [name for part, name in parts.items() if part.endswith("_bias")]


class _Expert(NamedTuple):
    at: str  # the tensors' names, less _blocks and _scales
    expert: int
    rows: slice
    shape: tuple[int, int]

    def planes(self, files: TensorSource, device: Device) -> Planes:
        blocks, scales = (
            files.tensor(f"{self.at}_{kind}")[self.expert] for kind in ("blocks", "scales")
        )
        return mxfp4.part_planes(blocks, scales, self.rows, f"{self.at}_scales", device)


def _is_ordered(stored: StoredMatrix, group: int) -> bool:
    """Return whether columns are not in group order; most files store an identity order."""
    part = next((part for part in ("g_idx", "weight_g_idx") if part in stored), None)
    return part is not None and column_order(stored.tensor(part).long(), group) is not None


def _by_module(names: list[str]) -> Mapping[str, dict[str, str]]:
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = name
    return modules
