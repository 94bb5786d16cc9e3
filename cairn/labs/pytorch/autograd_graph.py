"""What is the graph that backward walks? Built by forward, walked backwards, summed where paths meet.

    forward   each operation leaves a node that knows how to turn the gradient of its result into that of its inputs
    backward  nodes run when all that use their result have run; at a parameter gradients are added up

A tied embedding (the first and the last matrix of a model are one) is the test: its gradient must be the sum of what
each of the two places gives alone.
"""

from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Question, Words
from cairn.labs.pytorch._tiny_model import hidden, tiny_model, tokens_of
from cairn.labs.workbench import Workbench


def run(bench: Workbench) -> Outcome:
    import torch

    model = tiny_model(layers=bench.pick(3, 1))
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
                "nodes that ran before somebody who uses their result", "早于使用者执行的节点数"
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
    found, waiting = {root}, [root]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    return list(found)


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


LAB = Lab(
    name="autograd-graph",
    area="pytorch",
    title=Words("The autograd graph: build, walk, accumulate", "autograd 图：构建、遍历、累加"),
    hypothesis=Words(
        "The graph has one end per parameter, no node runs before those that use its result, and where two "
        "paths lead to one parameter its gradient is their sum.",
        "图中每个参数对应一个终点；没有节点会早于使用其结果者执行；两条路径通向同一参数时，梯度是两者之和。",
    ),
    run=run,
    causes=(
        Words(
            "a parameter that the loss does not depend on has no end in the graph",
            "loss 不依赖的参数在图里没有终点",
        ),
        Words(
            "an operation that detaches: no_grad, detach, integer casts",
            "某处断开了图：no_grad、detach、整型转换",
        ),
    ),
    code=(
        "cairn/models/transformer.py:Transformer",
        "cairn/kernels/norm/rmsnorm.py:rmsnorm",
        "cairn/train/parallel/buckets.py:Buckets",
    ),
    reading=(
        "Automatic Differentiation in Machine Learning: a Survey (2018)",
        "PyTorch: An Imperative Style, High-Performance Deep Learning Library (2019)",
    ),
    questions=(
        Question(
            Words("Why does reverse mode suit training?", "为什么训练用反向模式？"),
            Words(
                "One scalar loss and millions of inputs: one backward pass of about twice the forward's work "
                "gives all derivatives; forward mode would need one pass per parameter.",
                "一个标量 loss、上百万个输入：一次约为前向两倍工作量的反向就得到全部导数；"
                "前向模式要每个参数一遍。",
            ),
        ),
        Question(
            Words(
                "What happens without zero_grad, and when is that wanted?",
                "不调用 zero_grad 会怎样？什么时候正好需要？",
            ),
            Words(
                "AccumulateGrad adds to .grad, so gradients of several backwards sum up: a bug across steps, "
                "and exactly what gradient accumulation over micro-batches wants.",
                "AccumulateGrad 会加到 .grad 上，多次反向的梯度累加：跨步是 bug，而在 micro-batch "
                "间正是梯度累积所要的。",
            ),
        ),
        Question(
            Words("Why is a second backward() refused?", "为什么第二次 backward() 会报错？"),
            Words(
                "The tensors that nodes saved are freed as they are used, to save memory. retain_graph=True "
                "keeps them, at the price of the whole activation memory.",
                "节点保存的张量用完就释放以节省内存；retain_graph=True 会保留，代价是整份激活内存。",
            ),
        ),
    ),
    seconds=1.0,
)
