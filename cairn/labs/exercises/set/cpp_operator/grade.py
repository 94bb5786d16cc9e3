import torch

from cairn.labs.exercises.extension import operators
from cairn.labs.exercises.grading import Attempt, case, close, require


def built(file):
    return operators([file], "cairn_exercise")


def problem(n=1000):
    torch.manual_seed(0)
    return [torch.randn(n) * 3 for _ in range(3)]


@case("it compiles and the forward agrees with torch", "能编译，前向与 torch 一致")
def forward(attempt: Attempt) -> None:
    gate, up, _ = problem()
    close(built(attempt).swiglu(gate, up), torch.nn.functional.silu(gate) * up)


@case("the backward agrees with autograd", "反向与 autograd 一致")
def backward(attempt: Attempt) -> None:
    gate, up, grad = problem()
    g, u = gate.clone().requires_grad_(), up.clone().requires_grad_()
    expected = torch.autograd.grad(torch.nn.functional.silu(g) * u, [g, u], grad)
    gradients = built(attempt).swiglu_backward(grad, gate, up)
    close(gradients[0], expected[0])
    close(gradients[1], expected[1])


@case("large inputs stay finite", "大输入不溢出")
def large(attempt: Attempt) -> None:
    gate = torch.tensor([-90.0, 0.0, 90.0])
    close(built(attempt).swiglu(gate, torch.ones(3)), torch.nn.functional.silu(gate))


@case(
    "tensors that do not fit are refused, not read past their end",
    "不匹配的张量被拒绝，而不是越界读取",
)
def refused(attempt: Attempt) -> None:
    gate = torch.ones(4, 4)
    for up in (torch.ones(3), torch.ones(4, 4).t()[:, ::2].t()):
        try:
            built(attempt).swiglu(gate[: len(up)] if up.dim() == 2 else gate, up)
        except RuntimeError:
            continue
        require(
            False, f"up of shape {tuple(up.shape)} was taken", f"接受了形状 {tuple(up.shape)} 的 up"
        )


@case("the dispatcher knows its schema", "dispatcher 知道它的 schema")
def schema(attempt: Attempt) -> None:
    arguments = built(attempt).swiglu.default._schema.arguments
    require([one.name for one in arguments] == ["gate", "up"], "gate, up", "应为 gate、up")
