import torch

from cairn.labs.exercises.grading import Attempt, Figure, case, close, require


def made(attempt: Attempt):
    torch.manual_seed(0)
    weight = torch.randn(12, 20)
    return weight, attempt.LoRALinear(weight, 4, 8.0), torch.randn(30, 20)


def trained(attempt: Attempt):
    weight, layer, x = made(attempt)
    target = x @ (weight + 0.5 * torch.outer(torch.ones(12), torch.ones(20))).T
    chosen = [p for p in layer.parameters() if p.requires_grad]
    losses = []
    for _ in range(200):
        loss = (layer(x) - target).pow(2).mean()
        slopes = torch.autograd.grad(loss, chosen)
        with torch.no_grad():
            for parameter, slope in zip(chosen, slopes, strict=True):
                parameter -= 0.1 * slope
        losses.append(float(loss.detach()))
    return weight, layer, x, losses


@case("it begins as the original layer", "起始时等于原来的层")
def begins(attempt: Attempt) -> None:
    weight, layer, x = made(attempt)
    close(layer(x).detach(), x @ weight.T, 1e-5)


@case("training lowers the loss and leaves the base alone", "训练降低损失且不动底座")
def learns(attempt: Attempt) -> None:
    weight, layer, _, losses = trained(attempt)
    require(
        losses[-1] < 0.1 * losses[0],
        f"loss {losses[0]:.3g} to {losses[-1]:.3g}",
        f"损失 {losses[0]:.3g} 到 {losses[-1]:.3g}",
    )
    frozen = [p for p in layer.parameters() if not p.requires_grad]
    require(any(torch.equal(p, weight) for p in frozen), "the base weight changed", "底座权重变了")


@case("merged and separate give the same output", "合并与分离输出相同")
def merges(attempt: Attempt) -> None:
    _, layer, x, _ = trained(attempt)
    close((x @ layer.merged().T).detach(), layer(x).detach(), 1e-5)


@case("the update is scaled by alpha / r", "更新量乘 alpha / r")
def scaled(attempt: Attempt) -> None:
    weight, layer, x = made(attempt)
    with torch.no_grad():
        trainable = [p for p in layer.parameters() if p.requires_grad]
        for p in trainable:
            p.fill_(1.0)
    close((layer(x) - x @ weight.T).detach(), (x.sum(1, keepdim=True) * 4 * 2).expand(-1, 12), 1e-4)


@case("numbers that train", "可训练参数量")
def count(attempt: Attempt) -> Figure:
    _, layer, _ = made(attempt)
    return Figure(
        sum(p.numel() for p in layer.parameters() if p.requires_grad), 4 * (12 + 20), "parameters"
    )
