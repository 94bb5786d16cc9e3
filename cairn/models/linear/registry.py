"""The forms that weights can be served in, by name: what `--weights` takes. Imports nothing of torch.

A new form is a file with a class next to this one, and its line here. The class is created from a matrix [N, K] or from
the planes of a quantised one, implements `models.linear.form.LinearForm`, and reports with `obstacle` what it does not
support.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from cairn.models.linear.form import LinearForm
    from cairn.models.quantized.planes import Planes


class SchemeRegistration(NamedTuple):
    module: str
    name: str  # of the class
    about: str


# Made of one matrix after another, on any device.
FORMS = {
    "fp8": SchemeRegistration(
        "cairn.models.linear.fp8_rows",
        "Fp8Rows",
        "float8 rows with a scale each; activations by token",
    ),
    "w4a16": SchemeRegistration(
        "cairn.models.linear.packed_tiles",
        "W4A16",
        "4-bit levels in groups of 128, rounded to nearest; activations as they are",
    ),
    "w8a16": SchemeRegistration(
        "cairn.models.linear.packed_tiles",
        "W8A16",
        "8-bit levels with a scale for each row, rounded to nearest; activations as they are",
    ),
    "nvfp4": SchemeRegistration(
        "cairn.models.linear.packed_tiles",
        "NVFP4",
        "4-bit floats, 16 of which share a scale; activations as they are",
    ),
}
# Of the matrices of experts, made of all of a layer at once.
EXPERT_FORMS = {
    "fp8": SchemeRegistration(
        "cairn.kernels.experts.matrices",
        "quantize_experts",
        "float8 rows with a scale each; activations by token",
    ),
    "mxfp4": SchemeRegistration(
        "cairn.kernels.experts.matrices",
        "round_mxfp4",
        "4-bit floats, 32 of which share a power of two",
    ),
}
# Made with what is seen of the activations, on a CPU: `serve.engine.cpu_weights` chooses between them.
PACKED = ("int8", "int4", "packed")
CONVERTED = tuple(dict.fromkeys((*FORMS, *EXPERT_FORMS)))
NAMES = ("auto", "float", *PACKED, *CONVERTED)
# Made of planes, by the kind of device: the first class whose `obstacle(planes)` is None.
OF_PLANES: dict[str, tuple[SchemeRegistration, ...]] = {
    "cuda": (
        SchemeRegistration(
            "cairn.models.linear.fp8_planes",
            "Fp8Planes",
            "float8 rows as the checkpoint stores them; activations by token",
        ),
        SchemeRegistration(
            "cairn.models.linear.fp8_planes",
            "Fp8Blocks",
            "float8 blocks of 128 x 128 as the checkpoint stores them; activations by token",
        ),
        SchemeRegistration(
            "cairn.models.linear.packed_tiles",
            "PackedTiles",
            "levels of 4 or 8 bits as the checkpoint stores them; activations as they are",
        ),
        SchemeRegistration(
            "cairn.models.linear.weight_only",
            "WeightOnly",
            "levels of odd shapes and groups, and on other GPUs; activations as they are",
        ),
    ),
    "cpu": (),
}
PLANES = SchemeRegistration(
    "cairn.models.linear.planes_form", "PlanesForm", "planes that are dequantised for each product"
)


def form_class(name: str) -> Any:
    return _class(FORMS[name])


def expert_form(name: str) -> Any:
    """The function that makes a form of matrices [E, N, K]."""
    return _class(EXPERT_FORMS[name])


def form_of_planes(planes: "Planes", device: "torch.device | str") -> "LinearForm":
    """The form that multiplies fastest with these planes on a device."""
    return (fast_form(planes, device) or _class(PLANES))(planes)


def fast_form(planes: "Planes", device: "torch.device | str") -> Any:
    """The class whose kernel multiplies with these planes; None: there is none."""
    fast = map(_class, OF_PLANES.get(str(device).partition(":")[0], ()))
    return next((form for form in fast if form.obstacle(planes) is None), None)


def _class(registration: SchemeRegistration) -> Any:
    return getattr(import_module(registration.module), registration.name)
