"""How does a model leave this program? As weights that others load, and as a graph that others run.

    checkpoint   names, shapes and bytes: safetensors is a header of JSON and then the tensors, nothing else
    graph        torch.export: one graph of ATen operations with symbolic sizes, no Python left; what ONNX, AOTInductor
                 and TensorRT start from

The checkpoint must come back bit by bit, and be as large as its numbers; the graph must serve sizes it never saw.
"""

import warnings
from collections.abc import Iterable
from typing import Any

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.pytorch._tiny_model import hidden, tiny_model, tokens_of
from cairn.labs.workbench import Workbench


def run(bench: Workbench) -> Outcome:
    bench.step("a checkpoint, there and back")
    numbers, size, different = _round_trip(bench)
    bench.step("a graph with a symbolic size")
    products, worst, refused, expected = _graph(bench)
    return Outcome(
        checks=[
            *_of_checkpoint(numbers, size, different),
            *_of_graph(products, expected, worst, refused),
        ],
        table=Table(
            columns=[
                Words("form", "形式"),
                Words("carries", "包含"),
                Words("read by", "可被谁读取"),
            ],
            rows=FORMS,
        ),
    )


def _of_checkpoint(numbers: int, size: int, different: int) -> list[Check]:
    return [
        Check(
            what=Words(
                "bytes of the weights file, 4 per number and a header",
                "权重文件字节：每个数 4 字节加头部",
            ),
            predicted=4.0 * numbers,
            measured=float(size),
            unit="B",
            within=0.05,
        ),
        Check(
            what=Words("logits that differ after loading", "重新加载后不同的 logits 个数"),
            predicted=0.0,
            measured=float(different),
            unit="",
        ),
    ]


def _of_graph(products: int, expected: int, worst: float, refused: bool) -> list[Check]:
    return [
        Check(
            what=Words(
                "matrix products of the graph, as counted when running",
                "图中的矩阵乘个数，与运行时计数相同",
            ),
            predicted=float(expected),
            measured=float(products),
            unit="",
        ),
        Check(
            what=Words("largest error at sizes that were not traced", "未追踪过的形状上的最大误差"),
            predicted=1e-5,
            measured=worst,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "a size outside the declared range is refused (1 = yes)",
                "超出声明范围的形状被拒绝（1 = 是）",
            ),
            predicted=1.0,
            measured=float(refused),
            unit="",
        ),
    ]


FORMS = (
    (
        "safetensors + config.json",
        "weights, shape of the model",
        "transformers, vLLM, SGLang, cairn",
    ),
    (
        "torch.export",
        "ATen graph, weights, size constraints",
        "AOTInductor, ONNX exporter, TensorRT",
    ),
    ("ONNX", "graph of another operator set, weights", "ONNX Runtime, TensorRT, mobile runtimes"),
    ("GGUF", "quantised weights, tokenizer", "llama.cpp, cairn"),
)


def _round_trip(bench: Workbench) -> tuple[int, int, int]:
    """Numbers in the model, bytes of its file, and logits that changed on the way."""
    import torch

    from cairn.models.build import ModelBuild
    from cairn.models.checkpoint import open_checkpoint
    from cairn.models.export import export
    from cairn.models.weights import load_model

    model = tiny_model(layers=2, hidden=64, intermediate=256)
    folder = bench.folder / "exported"
    export(model, folder)
    opened = open_checkpoint(folder)
    again = load_model(opened.spec, opened.tensors, ModelBuild("cpu", torch.float32))
    tokens_T = tokens_of(model, 12)
    with torch.no_grad():
        before, after = (one.logits(hidden(one, tokens_T)) for one in (model, again))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return sum(p.numel() for p in model.parameters()), size, int((before != after).sum())


def _graph(bench: Workbench) -> tuple[int, float, bool, int]:
    """Operations of the exported graph, its worst error, whether a wrong size is refused; and operations "
    "when run."""
    import torch
    from torch.export import Dim

    from cairn.labs.pytorch._watched import Watched

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            model: Any = tiny_model(layers=1)
            self.norm, self.feed_forward = model.norm, model.layers[0].feed_forward

        def forward(self, x_TD: Any) -> Any:
            return self.feed_forward(self.norm(x_TD)).relu()

    block = Block()
    width = block.norm.weight.shape[0]
    rows = Dim("rows", min=2, max=64)
    example = torch.randn(8, width)
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
            exported = torch.export.export(block, (example,), dynamic_shapes={"x_TD": {0: rows}})
        run_it = exported.module()
        with Watched() as watched:
            block(example)
        worst = max(
            float((run_it(x) - block(x)).abs().max())
            for x in (torch.randn(count, width) for count in (2, 5, 33, 64))
        )
        refused = _refuses(run_it, torch.randn(65, width))
    names = (str(node.target) for node in exported.graph.nodes if node.op == "call_function")
    return _products(names), worst, refused, _products(watched.names)


def _products(names: Iterable[str]) -> int:
    """Matrix products, by whichever name; the rest is named differently from version to version."""
    return sum("mm" in name or "linear" in name for name in names)


def _refuses(run_it: Any, x: Any) -> bool:
    try:
        run_it(x)
    except (RuntimeError, AssertionError, ValueError):
        return True
    return False


LAB = described(__file__, run)
