"""How does a kernel of ours become an operation of torch? Three functions: compute, shape, gradient.

    compute    what runs: a Triton kernel, CUDA, or plain torch as here
    fake       shapes and types only, so that compilers can trace without running
    backward   autograd's node: what is saved, and how gradients are made

Then tracing sees one operation where there were six, and its gradient is checked against finite differences.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

NAME = "cairn_lab::rmsnorm"


def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.kernels.norm.rmsnorm import rmsnorm_reference

    bench.step("registering an operation")
    operation = _register()
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 16, generator=generator), torch.randn(16, generator=generator)
    same = float((operation(x, weight, 1e-6) - rmsnorm_reference(x, weight, 1e-6)).abs().max())
    bench.step("its gradient against autograd's")
    gap = _gradient_gap(operation, x, weight)
    bench.step("its gradient against finite differences")
    inputs = (x[:2, :4].double().requires_grad_(), weight[:4].double().requires_grad_())
    exact = torch.autograd.gradcheck(
        lambda a, b: operation(a, b, 1e-6), inputs, raise_exception=False
    )
    bench.step("what a tracer sees")
    traced, plain = (
        _traced(lambda a: operation(a, weight, 1e-6), x),
        _traced(lambda a: rmsnorm_reference(a, weight, 1e-6), x),
    )
    fake = _shape_without_running(operation, x, weight)
    return Outcome(
        checks=_checks(same, gap, exact, traced, fake),
        table=Table(
            columns=[Words("form", "形式"), Words("operations in the trace", "trace 中的算子")],
            rows=[["custom", ", ".join(traced)], ["plain", ", ".join(plain)]],
        ),
    )


def _checks(same: float, gap: float, exact: bool, traced: list[str], fake: bool) -> list[Check]:
    return [
        Check(
            what=Words("difference from the reference", "与参考实现的差"),
            predicted=0.0,
            measured=same,
            unit="",
        ),
        Check(
            what=Words("gradient beside autograd's, relative", "梯度与 autograd 的相对差"),
            predicted=1e-5,
            measured=gap,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "gradient beside finite differences (1 = agrees)", "梯度与有限差分（1 = 一致）"
            ),
            predicted=1.0,
            measured=float(exact),
            unit="",
        ),
        Check(
            what=Words("operations that a tracer sees", "追踪看到的算子数"),
            predicted=1.0,
            measured=float(len(traced)),
            unit="",
        ),
        Check(
            what=Words("shape found without running (1 = right)", "不运行就得到的形状（1 = 正确）"),
            predicted=1.0,
            measured=float(fake),
            unit="",
        ),
    ]


def _register() -> Any:
    """Once in a process: torch refuses a second registration of a name."""
    import torch

    operator = getattr(torch.ops.cairn_lab, "rmsnorm", None)
    if operator is not None:
        return operator.default
    from cairn.kernels.norm.rmsnorm import rmsnorm_reference

    @torch.library.custom_op(NAME, mutates_args=())
    def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rmsnorm_reference(x, weight, eps)

    @rmsnorm.register_fake
    def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.empty_like(x)

    rmsnorm.register_autograd(_backward, setup_context=_keep)
    return torch.ops.cairn_lab.rmsnorm.default


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, eps = inputs
    ctx.save_for_backward(x, weight)
    ctx.eps = eps


def _backward(ctx: Any, grad: Any) -> Any:
    """With r = 1 / sqrt(mean(x^2) + eps), n = x r and h = g w:   dx = r (h - n mean(h n)),   dw = sum(g n)."""
    x, weight = ctx.saved_tensors
    rstd = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    n, h = x * rstd, grad * weight
    dx = rstd * (h - n * (h * n).mean(-1, keepdim=True))
    return dx, (grad * n).sum(0), None


def _gradient_gap(operation: Any, x: Any, weight: Any) -> float:
    import torch

    from cairn.kernels.norm.rmsnorm import rmsnorm_reference

    gradients = []
    for form in (operation, rmsnorm_reference):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        form(a, b, 1e-6).sin().sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        gradients.append(torch.cat([a.grad.flatten(), b.grad.flatten()]))
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


def _traced(function: Any, x: Any) -> list[str]:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(function)(x)
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def _shape_without_running(operation: Any, x: Any, weight: Any) -> bool:
    return operation(x.to("meta"), weight.to("meta"), 1e-6).shape == x.shape


LAB = described(__file__, run)
