"""The forms that weights can be served in, by name: what `--weights` takes. Imports nothing of torch.

A new form is a file with a class beside this one, and its line here. The class is made of one matrix [N, K], has the
methods of `models.linear.form.Form`, and says with `obstacle(weight)` where it has no product.
"""

from importlib import import_module
from typing import Any, NamedTuple


class Registration(NamedTuple):
    module: str
    name: str  # of the class
    about: str


# Made of one matrix after another, on any device.
FORMS = {
    "fp8": Registration(
        "cairn.models.linear.fp8_rows",
        "Fp8Rows",
        "float8 rows with a scale each; activations by token",
    ),
}
# Made with what is seen of the activations, on a CPU: `serve.engine.cpu_weights` chooses between them.
PACKED = ("int8", "int4")
NAMES = ("auto", "float", *PACKED, *FORMS)


def form_class(name: str) -> Any:
    found = FORMS[name]
    return getattr(import_module(found.module), found.name)
