"""Weight formats for serving: bytes per weight, and whether matmuls run at the 8-bit rate.

    fp8, w8a8              8 bits, activations rounded too: products at the rate of float8
    w8a16                  8 bits; activations as they are: products at the rate of bfloat16
    w4a16, mxfp4, nvfp4    4 bits and their scales; likewise
    q4_k, q6_k, q8_0       blocks of a GGUF file

A checkpoint's config.json, or a GGUF file's header, says its own bits. Lookup and output projection
stay in bfloat16. Torch-free.
"""

from typing import NamedTuple

from cairn.core.errors import ConfigError, did_you_mean
from cairn.models.quantized.scheme import Quantization


class WeightForm(NamedTuple):
    name: str
    bits: float  # of a weight in a layer, scales included
    eight_bit: bool = False  # products run at the rate of 8 bits

    @property
    def bytes(self) -> float:
        return self.bits / 8


BF16 = WeightForm("bf16", 16)
FORMS = {
    form.name: form
    for form in (
        BF16,
        WeightForm("fp8", 8, True),
        WeightForm("w8a8", 8, True),
        WeightForm("w8a16", 8),
        WeightForm("w4a16", 4.125),  # groups of 128
        WeightForm("mxfp4", 4.25),
        WeightForm("nvfp4", 4.5),
        WeightForm("q4_k", 4.5),
        WeightForm("q6_k", 6.5625),
        WeightForm("q8_0", 8.5),
    )
}

# What vLLM's users write for 4 bits in groups; there they name formats and kernels.
NAMES_OF_VLLM = dict.fromkeys(("gptq", "awq", "gptq_marlin", "awq_marlin"), "w4a16")


def weight_form(asked: str, stored: WeightForm | None) -> WeightForm:
    """The requested weight format, or the stored one."""
    if asked:
        asked = NAMES_OF_VLLM.get(asked, asked)
        if asked not in FORMS:
            raise ConfigError(
                f"no form of weights is called '{asked}'",
                hint=did_you_mean(asked, FORMS, "one of: " + ", ".join(FORMS)),
            )
        return FORMS[asked]
    return BF16 if stored is None else stored


def stored_form(stored: Quantization | None) -> WeightForm | None:
    """Weight format of a checkpoint's config.json; None for floating point."""
    if stored is None:
        return None
    schemes = [rule.scheme for rule in stored.rules if rule.scheme is not None]
    rounded = bool(schemes) and schemes[-1].activations != "float"
    return WeightForm(stored.method, stored.bits(), rounded)
