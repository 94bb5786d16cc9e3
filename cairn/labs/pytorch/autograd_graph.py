"""What is the graph that backward walks? Built by forward, walked backwards, summed where paths meet.

    forward   each operation leaves a node that knows how to turn the gradient of its result into that of its inputs
    backward  nodes run when all that use their result have run; at a parameter gradients are added up

A tied embedding (the first and the last matrix of a model are one) is the test: its gradient must be the sum of what
each of the two places gives alone.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Words, described
from cairn.labs.pytorch._tiny_model import hidden, tiny_model, tokens_of
from cairn.labs.workbench import Workbench


def run(bench: Workbench) -> Outcome:
    import torch

    model = tiny_model(layers=bench.setting("layers", bench.pick(3, 1)))
    tokens_T = tokens_of(model, 24)
    bench.step("walking the graph")
    loss = _loss(model, tokens_T)
    nodes = _nodes(loss.grad_fn)
    leaves = [node for node in nodes if type(node).__name__ == "AccumulateGrad"]
    early = _out_of_order(loss, nodes)
    bench.step("two paths to one matrix")
    weight = model.embedding.weight
    both = weight.grad.clone()  # type: ignore[union-attr]
    apart = _paths_apart(model, tokens_T)
    gap = float((both - apart).norm() / both.norm())
    return Outcome(
        checks=_checks(model, leaves, early, gap, loss),
        notes=[
            Words(
                f"{len(nodes)} nodes for a model of {len(model.layers)} layers and {len(tokens_T)} tokens.",
                f"{len(model.layers)} 层、{len(tokens_T)} 个 token 的模型共有 {len(nodes)} 个节点。",
            ),
            Words(
                f"torch {torch.__version__}: the graph is built anew in every forward pass.",
                f"torch {torch.__version__}：每次前向都重新建图。",
            ),
        ],
    )


def _checks(model: Any, leaves: list[Any], early: int, gap: float, loss: Any) -> list[Check]:
    return [
        Check(
            what=Words("ends of the graph, one for each parameter", "图的终点：每个参数一个"),
            predicted=float(sum(1 for _ in model.parameters())),
            measured=float(len(leaves)),
            unit="",
        ),
        Check(
            what=Words(
                "nodes that ran before a node that uses their result", "早于使用者执行的节点数"
            ),
            predicted=0.0,
            measured=float(early),
            unit="",
        ),
        Check(
            what=Words(
                "tied matrix: gradient beside the sum of both paths",
                "绑定矩阵：梯度与两条路径之和的相对差",
            ),
            predicted=1e-5,
            measured=gap,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "a second backward is refused (1 = yes)", "第二次 backward 被拒绝（1 = 是）"
            ),
            predicted=1.0,
            measured=float(_refused(loss)),
            unit="",
        ),
    ]


def _loss(model: Any, tokens_T: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model.logits(hidden(model, tokens_T)), tokens_T)


def _nodes(root: Any) -> list[Any]:
    """Every node that can be reached, each once."""
    nodes, waiting = {root}, [root]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting.append(node)
    return list(nodes)


def _out_of_order(loss: Any, nodes: list[Any]) -> int:
    """Runs backward and counts nodes that began before all those that feed them had begun."""
    order: dict[Any, int] = {}

    def note(node: Any) -> Any:
        def began(*_: Any) -> None:
            order.setdefault(node, len(order))

        return began

    handles = [node.register_prehook(note(node)) for node in nodes]
    loss.backward()
    for handle in handles:
        handle.remove()
    feeds = ((node, after) for node in nodes for after, _ in node.next_functions if after in order)
    return sum(order[node] > order[after] for node, after in feeds)


def _paths_apart(model: Any, tokens_T: Any) -> Any:
    """The matrix' gradient as the embedding alone, plus that as the head alone."""
    import torch

    total = torch.zeros_like(model.embedding.weight)
    for as_head in (False, True):
        model.zero_grad()
        states_TD = hidden(model, tokens_T)
        if as_head:
            scores_TV = model.logits(states_TD.detach())
        else:
            scores_TV = states_TD @ model.embedding.weight.detach().T
        torch.nn.functional.cross_entropy(scores_TV, tokens_T).backward()
        total += model.embedding.weight.grad
    return total


def _refused(loss: Any) -> bool:
    try:
        loss.backward()
    except RuntimeError:
        return True
    return False


LAB = described(__file__, run)
