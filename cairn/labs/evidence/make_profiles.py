"""Runs small programs with one fault each and writes what torch's profiler saw: evidence for the drills.

    python -m cairn.labs.evidence.make_profiles FOLDER [NAME ...]     one NAME.txt for each scenario

The model is a small decoder; what differs is the fault. Nothing in a file names it. Some faults exist on a GPU only
(pageable copies, waits for a scalar). What a CPU showed is shipped as profile-X.txt, what an H200 showed as gpu-X.txt.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from cairn.labs.evidence.profile_report import events_of, report

STEPS = 6
Step = Callable[[], None]


class Block(nn.Module):
    """Attention and a feed-forward; heads are cut by a reshape, as everywhere."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, width = x_BTD.shape
        parts = self.qkv(self.norms[0](x_BTD)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x_BTD + self.down(nn.functional.gelu(self.up(self.norms[1](x_BTD))))


class Decoder(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed(ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


class Bench:
    """Sizes for this device, and what the scenarios share."""

    def __init__(self, device: str) -> None:
        self.device, self.quick = device, device == "cpu"  # small shapes
        self.width, self.layers, self.batch, self.tokens = (
            (128, 4, 4, 64) if self.quick else (1024, 8, 8, 1024)
        )
        self.vocab = 512 if self.quick else 32_768

    def decoder(self, vocab: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Decoder:
        made = Decoder(vocab or self.vocab, self.width, self.layers, 8 if not self.quick else 2)
        return made.to(self.device, torch.float32 if self.device == "cpu" else dtype)

    def ids(self, vocab: int | None = None, on: str | None = None) -> Tensor:
        size = (self.batch, self.tokens)
        return torch.randint(vocab or self.vocab, size, device=on or self.device)


def training(bench: Bench, vocab: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Step:
    """One step of plain training: the form that the others are held against."""
    model = bench.decoder(vocab, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=bench.device != "cpu")
    ids = bench.ids(vocab)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def scalar_each_layer(bench: Bench) -> Step:
    """A training step that reads one number of every layer on the host."""
    model = bench.decoder()
    optimizer = torch.optim.AdamW(model.parameters(), fused=bench.device != "cpu")
    ids = bench.ids()
    seen: list[float] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, i, out: seen.append(out.abs().max().item()))

    def step() -> None:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append(loss.item())

    return step


def one_row_eager(bench: Bench) -> Step:
    """One token of one sequence, operator by operator."""
    model = bench.decoder().eval()
    ids = bench.ids()[:1, :1]

    @torch.no_grad()
    def step() -> None:
        for _ in range(8):
            model(ids)

    return step


def slow_batches(bench: Bench) -> Step:
    """A batch is made on the host, by the thread that launches the kernels."""
    plain = training(bench)
    rows = 20_000 if bench.quick else 60_000

    def batches() -> Iterator[Tensor]:
        while True:
            with record_function("next(batches)"):
                texts = [f"row {n} of the corpus".split() for n in range(rows)]
                lengths = torch.tensor([len(text) for text in texts])
            yield lengths

    source = batches()

    def step() -> None:
        next(source)
        plain()

    return step


def pageable_upload(bench: Bench) -> Step:
    """Images go to the device out of ordinary memory, and the step waits for them."""
    plain = training(bench)
    images = torch.randn(8 if bench.quick else 192, 3, 224, 224)

    def step() -> None:
        images.to(bench.device)
        plain()

    return step


def emptied_cache(bench: Bench) -> Step:
    """A call to empty_cache in every step, meant against fragmentation."""
    plain = training(bench)

    def step() -> None:
        plain()
        if bench.device != "cpu":
            torch.cuda.empty_cache()

    return step


def full_precision(bench: Bench) -> Step:
    """Weights and activations in float32, and matrix products at "highest"."""
    torch.set_float32_matmul_precision("highest")
    return training(bench, dtype=torch.float32)


def odd_vocabulary(bench: Bench) -> Step:
    """The tokenizer's own count of entries."""
    return training(bench, vocab=131 if bench.quick else 50_257)


def strided_layout(bench: Bench) -> Step:
    """Feature maps whose channels lie apart, through operators that want them side by side."""
    count, side = (16, 32) if bench.quick else (256, 56)
    dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
    x = torch.randn(count, 64, side, side, device=bench.device, dtype=dtype)
    linear = nn.Linear(64, 64).to(bench.device, dtype)
    norm = nn.LayerNorm(64).to(bench.device, dtype)

    @torch.no_grad()
    def step() -> None:
        y = x
        for _ in range(8):
            y = linear(norm(y.permute(0, 2, 3, 1).contiguous())).permute(0, 3, 1, 2).contiguous()

    return step


def loop_over_parameters(bench: Bench) -> Step:
    """An optimizer written as one loop over tensors."""
    model = bench.decoder()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
    ids = bench.ids()[:1, :16]

    def step() -> None:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def checked_backward(bench: Bench) -> Step:
    """Anomaly detection that was left on: backward checks every gradient for NaN, and each check waits for the GPU."""
    plain = training(bench)

    def step() -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            plain()

    return step


SCENARIOS: dict[str, Callable[[Bench], Step]] = {
    "profile-a": training,
    "profile-b": scalar_each_layer,
    "profile-c": one_row_eager,
    "profile-d": slow_batches,
    "profile-e": pageable_upload,
    "profile-f": emptied_cache,
    "profile-g": full_precision,
    "profile-h": odd_vocabulary,
    "profile-i": strided_layout,
    "profile-j": loop_over_parameters,
    "profile-k": checked_backward,
}


def profiled(step: Step, device: str) -> dict[str, Any]:
    """The trace of some steps after a few that are not looked at."""
    for _ in range(3):
        step()
    _wait(device)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device != "cpu" else [])]
    with profile(activities=kinds) as seen:
        for _ in range(STEPS):
            step()
        _wait(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return json.loads(path.read_text())


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main(folder: Path, names: list[str]) -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device != "cpu" else "one core of a CPU"
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or SCENARIOS:
        torch.manual_seed(0)
        began = time.perf_counter()
        step = SCENARIOS[name](Bench(device))
        head = f"torch {torch.__version__.partition('+')[0]} profiler on {where}, summarised"
        (folder / f"{name}.txt").write_text(report(events_of(profiled(step, device)), STEPS, head))
        torch.set_float32_matmul_precision("highest")
        del step
        if device != "cpu":
            torch.cuda.empty_cache()
        print(f"{name} {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join(SCENARIOS)}; all of them by default"
    )
    given = parser.parse_args()
    main(given.folder, given.names)
