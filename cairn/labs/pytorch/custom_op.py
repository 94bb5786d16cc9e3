"""How does a kernel of ours become an operation of torch? Three functions: compute, shape, gradient.

    compute    what runs: a Triton kernel, CUDA, or plain torch as here
    fake       shapes and types only, so that compilers can trace without running
    backward   autograd's node: what is saved, and how gradients are made

Then tracing sees one operation where there were six, and its gradient is checked against finite differences.
"""

from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
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
    exact = torch.autograd.gradcheck(lambda a, b: operation(a, b, 1e-6), inputs)
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

    found = getattr(torch.ops.cairn_lab, "rmsnorm", None)
    if found is not None:
        return found.default
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

    found = []
    for form in (operation, rmsnorm_reference):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        form(a, b, 1e-6).sin().sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        found.append(torch.cat([a.grad.flatten(), b.grad.flatten()]))
    return float((found[0] - found[1]).norm() / found[1].norm())


def _traced(function: Any, x: Any) -> list[str]:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(function)(x)
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def _shape_without_running(operation: Any, x: Any, weight: Any) -> bool:
    return operation(x.to("meta"), weight.to("meta"), 1e-6).shape == x.shape


LAB = Lab(
    name="custom-op",
    area="pytorch",
    title=Words("A custom operation, registered properly", "正确注册一个自定义算子"),
    hypothesis=Words(
        "With compute, fake and backward registered, a tracer sees one operation instead of six, shapes are "
        "known without running, and gradients agree with autograd and with finite differences.",
        "注册了 compute、fake 和 backward 之后，追踪只看到一个算子而不是六个，不运行也知道形状，梯度与 "
        "autograd 和有限差分一致。",
    ),
    run=run,
    causes=(
        Words("an error in the backward formula", "反向公式有误"),
        Words("another version of torch.library", "torch.library 版本不同"),
    ),
    code=(
        "cairn/kernels/norm/rmsnorm.py:rmsnorm",
        "cairn/kernels/norm/rmsnorm_backward.py",
        "cairn/train/products.py:product",
    ),
    reading=(
        "The Custom Operators Manual of PyTorch (2024)",
        "Root Mean Square Layer Normalization (2019)",
    ),
    questions=(
        Question(
            Words("Why is a fake (meta) function needed?", "为什么需要 fake（meta）函数？"),
            Words(
                "Tracers, torch.compile and FSDP's meta initialisation run the program on tensors without "
                "data: they need the shape, type and strides of the result, never its values.",
                "追踪、torch.compile 和 FSDP 的 meta 初始化都用没有数据的张量跑程序：只需要结果的形状、"
                "类型和 stride，不需要值。",
            ),
        ),
        Question(
            Words(
                "torch.autograd.Function or torch.library.custom_op?",
                "torch.autograd.Function 还是 torch.library.custom_op？",
            ),
            Words(
                "Function is enough in eager mode and what our kernels use. custom_op is opaque to "
                "compilers, which keep it whole; it declares mutation and has a schema, so export works.",
                "eager 模式用 Function 足够，我们的内核就这样；custom_op 对编译器是不透明的整体，"
                "声明了是否修改参数并有 schema，因此可以导出。",
            ),
        ),
        Question(
            Words("How do you test a backward?", "怎么测试反向？"),
            Words(
                "gradcheck in float64 against finite differences, a reference by autograd in float32, odd "
                "shapes and strides, and opcheck for schema, fake and aliasing.",
                "float64 下用 gradcheck 对比有限差分，float32 下对比 autograd 参考；测试奇异形状与 stride；"
                "opcheck 检查 schema、fake 与别名。",
            ),
        ),
    ),
    seconds=3.0,
)
