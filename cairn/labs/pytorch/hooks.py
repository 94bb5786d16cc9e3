"""When exactly do hooks run, and what are they good for?

    module(x)      pre-forward hooks -> forward -> forward hooks                 not when forward() is called directly
    backward       a parameter's post-accumulate hook runs when its gradient is complete: last layers first

The second kind is how communication overlaps with backward: our buckets of gradients are sent the moment that their
last gradient is there, long before backward ends.
"""

import itertools
from typing import Any

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.pytorch._tiny_model import hidden, tiny_model, tokens_of
from cairn.labs.workbench import Workbench


def run(bench: Workbench) -> Outcome:
    layers = bench.setting("layers", bench.pick(6, 4))
    model = tiny_model(layers=layers, tied=False)
    tokens_T = tokens_of(model, 16)
    bench.step("hooks of modules")
    calls, bypassed = _module_calls(model, tokens_T), _bypassed(model, tokens_T)
    bench.step("hooks of gradients")
    order = [number for number in _gradient_order(model, tokens_T) if number is not None]
    turns = sum(later > earlier for earlier, later in itertools.pairwise(order))
    bench.step("buckets on their way during backward")
    launched, sent_early, whole = _buckets(model, tokens_T)
    return Outcome(
        checks=[
            *_of_modules(layers, len(calls), bypassed),
            *_of_gradients(turns, launched, sent_early, whole),
        ],
        table=Table(
            columns=[
                Words("hook", "hook"),
                Words("runs", "何时运行"),
                Words("used here for", "在本项目中的用途"),
            ],
            rows=HOOKS,
        ),
    )


def _of_modules(layers: int, calls: int, bypassed: int) -> list[Check]:
    return [
        Check(
            what=Words("layer hooks that ran in one forward pass", "一次前向中运行的层 hook 数"),
            predicted=2.0 * layers,
            measured=float(calls),
            unit="",
        ),
        Check(
            what=Words(
                "and when forward() is called past them", "绕过 __call__ 直接调 forward() 时"
            ),
            predicted=0.0,
            measured=float(bypassed),
            unit="",
        ),
    ]


def _of_gradients(turns: int, launched: int, sent_early: int, whole: int) -> list[Check]:
    return [
        Check(
            what=Words("gradients that came before those of a later layer", "早于更后层的梯度个数"),
            predicted=0.0,
            measured=float(turns),
            unit="",
        ),
        Check(
            what=Words("buckets launched, of all", "发出的桶数（共计）"),
            predicted=float(whole),
            measured=float(launched),
            unit="",
        ),
        Check(
            what=Words("buckets on their way before backward ended", "反向结束前已发出的桶数"),
            predicted=float(whole - 1),
            measured=float(sent_early),
            unit="",
            kind="at_least",
        ),
    ]


HOOKS = (
    ("forward pre / forward", "around module(x)", "profiling spans, activation probes"),
    ("full backward", "when a module's input gradient is there", "debugging NaN"),
    ("post accumulate grad", "when .grad of a parameter is complete", "gradient buckets, overlap"),
    ("saved tensors", "when autograd keeps or needs a tensor", "offload, recompute"),
)


def _module_calls(model: Any, tokens_T: Any) -> list[str]:
    calls: list[str] = []
    handles = []
    for number, layer in enumerate(model.layers):
        handles.append(
            layer.register_forward_pre_hook(lambda *_, n=number: calls.append(f"before {n}"))
        )
        handles.append(layer.register_forward_hook(lambda *_, n=number: calls.append(f"after {n}")))
    hidden(model, tokens_T)
    for handle in handles:
        handle.remove()
    return calls


def _bypassed(model: Any, tokens_T: Any) -> int:
    """Calls of a hook when its module's forward is called like a plain function."""
    calls: list[int] = []
    handle = model.norm.register_forward_hook(lambda *_: calls.append(1))
    model.norm.forward(model.embedding(tokens_T))
    handle.remove()
    return len(calls)


def _gradient_order(model: Any, tokens_T: Any) -> list[int | None]:
    """The layer of each parameter, in the order in which gradients were complete."""
    order: list[int | None] = []
    handles = []
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        layer = int(parts[1]) if parts[0] == "layers" else None
        handles.append(
            parameter.register_post_accumulate_grad_hook(lambda _, n=layer: order.append(n))
        )
    model.logits(hidden(model, tokens_T)).sum().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return order


def _buckets(model: Any, tokens_T: Any) -> tuple[int, int, int]:
    """Buckets that were launched in all, and before backward returned; and how many there are."""
    from cairn.train.parallel.buckets import Buckets

    launched: list[list[str]] = []
    parameters = dict(model.named_parameters())
    buckets = Buckets(parameters, launched.append, most_bytes=16 << 10)
    buckets.arm()
    model.logits(hidden(model, tokens_T)).sum().backward()
    early = len(launched)
    buckets.flush()
    return len(launched), early, len(buckets.buckets)


LAB = described(__file__, run)
