import torch

from cairn.labs.exercises.grading import Attempt, Figure, case, close, equal


def problem(attempt: Attempt, ranks=4):
    torch.manual_seed(0)
    weight = torch.randn(8, 6)
    x = [torch.randn(3, 6) for _ in range(ranks)]
    return (
        weight,
        x,
        [torch.randn(3, 8) for _ in range(ranks)],
        attempt.ShardedLinear(weight, ranks),
    )


@case("outputs are those of the whole layer", "输出与完整层一致")
def outputs(attempt: Attempt) -> None:
    weight, x, _, layer = problem(attempt)
    close(torch.stack(layer.forward(x)), torch.stack(x) @ weight.T)


@case("gradients agree with the whole batch", "梯度与整批一致")
def gradients(attempt: Attempt) -> None:
    weight, x, grad_y, layer = problem(attempt)
    layer.forward(x)
    grad_x, shards = layer.backward(grad_y)
    close(torch.stack(grad_x), torch.stack(grad_y) @ weight)
    mean = sum(g.T @ part for g, part in zip(grad_y, x, strict=True)) / 4
    close(torch.cat(shards), mean)


@case("nothing whole is alive between the passes", "前向与反向之间没有完整权重")
def freed(attempt: Attempt) -> None:
    _, x, grad_y, layer = problem(attempt)
    layer.forward(x)
    equal(layer.gathered, 0)
    layer.backward(grad_y)
    equal(layer.gathered, 0)


@case("numbers of gradient that a rank keeps", "每个 rank 保留的梯度量")
def kept(attempt: Attempt) -> Figure:
    _, x, grad_y, layer = problem(attempt)
    layer.forward(x)
    return Figure(max(part.numel() for part in layer.backward(grad_y)[1]), 8 * 6 / 4, "numbers")
