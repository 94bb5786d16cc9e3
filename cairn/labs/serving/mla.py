"""Keys and values as one small latent per token: what the engine keeps, whether the answer stays, what a step costs.

    MHA    cache k, v of every head                      2 x heads x size
    MLA    cache c = W_down x (and one rotary key)       rank + rotated
           k_h = U_h c, so q_h . k_h = (U_h^T q_h) . c   the up-projection moves to the query: nothing is unpacked

Three predictions about this project's own engine and `models/latent.py`: bytes of a page, tokens that differ between
decoding over cached rows (absorbed) and a forward pass without a cache (expanded), and the time of one token. On a GPU
the decode kernel is timed, too.
"""

from typing import TYPE_CHECKING

import msgspec

from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._engine import ask, drain, small_engine, words
from cairn.labs.workbench import Workbench
from cairn.models.cache import cache_groups
from cairn.models.spec import Latent, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.models.latent import LatentTokens

HEADS, SIZE, RANK, ROTARY = 16, 64, 128, 32
LATENT = ModelSpec(
    family="deepseek_v2",
    vocab=512,
    hidden=64,
    layers=2,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=SIZE + ROTARY,
    intermediate=128,
    context=4096,
    mixer="latent",
    latent=Latent(rank=RANK, unrotated=SIZE, rotated=ROTARY, value=SIZE),
)
# The same heads with a key and a value each.
PLAIN = msgspec.structs.replace(LATENT, family="llama", mixer="attention", latent=None)
PAGE, PAGES = 16, 8
PROMPT = 40


@one_thread()
def run(bench: Workbench) -> Outcome:
    bench.step("pages of both caches")
    ratio = page_bytes_of(PLAIN) / page_bytes_of(LATENT)
    bench.step("the engine over latents, and a pass without a cache")
    outputs = bench.pick(32, 12)
    answered, again = decoded(LATENT, outputs)
    slow, fast = [], []
    for length in bench.pick((512, 2048, 8192), (512, 2048)):
        bench.step(f"one token over {length} latents")
        expanded_s, absorbed_s = one_token(bench, length)
        slow.append((float(length), expanded_s * 1e3))
        fast.append((float(length), absorbed_s * 1e3))
    checks = [_bytes(ratio), _same(answered, again), _faster(slow[-1], fast[-1])]
    if bench.on_gpu:
        checks.append(_kernel(bench))
    return Outcome(
        checks=checks,
        plots=[_plot(slow, fast)],
        table=_table(),
    )


def page_bytes_of(spec: ModelSpec) -> int:
    """What the engine's pool really allocates for a page."""
    import torch

    from cairn.serve.engine.pages import PagePool

    return PagePool(cache_groups(spec), PAGES, PAGE, torch.float32, "cpu").page_bytes


def decoded(spec: ModelSpec, outputs: int) -> tuple[list[int], list[int]]:
    """Tokens by the engine, and what a pass over the whole text without a cache would have chosen at each place."""
    import torch

    from cairn.models.attend import PackedDocuments

    engine = small_engine(spec, block_size=PAGE, num_gpu_blocks_override=64)
    request = ask(0, words(PROMPT, spec.vocab, seed=3), outputs)
    drain(engine, [request])
    answered = list(request.outputs)
    text = torch.tensor([*request.prompt, *answered])
    whole = PackedDocuments([len(text)])
    with torch.inference_mode():
        model = engine.runner.model
        hidden_TD = model(text, whole.positions_T(), whole)
        best_T = model.logits(hidden_TD[PROMPT - 1 : -1]).argmax(-1)
    return answered, best_T.tolist()


def one_token(bench: Workbench, length: int) -> tuple[float, float]:
    """Seconds of one query over so many cached rows: expanded, and absorbed."""
    import torch

    from cairn.models.attend import AttentionRule, attention

    tokens, rows_N1E = _inputs(length)
    rule = AttentionRule(0, (SIZE + ROTARY) ** -0.5, 0, 0.0)

    def expanded() -> "Tensor":
        return attention(tokens.q_THC, *tokens.expansion.expanded(rows_N1E[:, 0]), rule)

    def absorbed() -> "Tensor":
        return tokens.attended(slice(0, 1), rows_N1E, rule)

    with torch.inference_mode():
        costs = [
            bench.time(form, device="cpu", budget_ms=150).p10_s for form in (expanded, absorbed)
        ]
    return costs[0], costs[1]


def _inputs(length: int) -> "tuple[LatentTokens, Tensor]":
    """The model's own expansion, a query, and rows of so many tokens."""
    import torch

    from cairn.models.build import ModelBuild
    from cairn.models.latent import Expansion, LatentTokens

    assert LATENT.latent is not None
    draw = torch.Generator().manual_seed(1)
    expansion = Expansion(ModelBuild(device="cpu", dtype=torch.float32), LATENT, LATENT.latent)
    with torch.no_grad():
        expansion.weight.normal_(std=0.1, generator=draw)
    q_THC = torch.randn(1, HEADS, SIZE + ROTARY, generator=draw)
    rows_N1E = torch.randn(length, 1, RANK + ROTARY, generator=draw)
    return LatentTokens(q_THC, rows_N1E[-1:, 0], expansion), rows_N1E


def _bytes(ratio: float) -> Check:
    return Check(
        what=Words("bytes of a page: MHA over MLA", "每页字节：MHA 比 MLA"),
        predicted=2 * HEADS * (SIZE + ROTARY) / (RANK + ROTARY),
        measured=ratio,
        unit="x",
        within=1e-9,
    )


def _same(answered: list[int], again: list[int]) -> Check:
    return Check(
        what=Words(
            "tokens that a pass without a cache would have chosen otherwise",
            "不用 cache 重算会选得不同的 token 数",
        ),
        predicted=0,
        measured=sum(a != b for a, b in zip(answered, again, strict=True)),
        unit="tokens",
    )


def _faster(slow: tuple[float, float], fast: tuple[float, float]) -> Check:
    """FLOPs of one token: making every key and value again, against two products with the rows."""
    flops_slow = 2 * 2 * HEADS * SIZE * RANK + 4 * HEADS * SIZE
    flops_fast = 4 * HEADS * (RANK + ROTARY)
    return Check(
        what=Words(
            f"expanded over absorbed, time at {slow[0]:.0f} tokens",
            f"{slow[0]:.0f} token 时展开/吸收的时间比，至少",
        ),
        predicted=0.1 * flops_slow / flops_fast,
        measured=slow[1] / fast[1],
        unit="x",
        kind="at_least",
    )


def _kernel(bench: Workbench) -> Check:
    """64 sequences of 8,192 latents of DeepSeek's sizes with 16 heads: bytes of the rows over time, beside a copy."""
    import torch

    from cairn.kernels.paged.latent_attention import latent_attention

    bench.step("the decode kernel on the GPU")
    make = {"device": bench.device, "dtype": torch.bfloat16}
    cache, q_THE = torch.randn(64 * 512, 16, 1, 576, **make), torch.randn(64, 16, 576, **make)
    tables = torch.arange(64 * 512, dtype=torch.int32, device=bench.device).view(64, 512)
    lengths = torch.full((64,), 8192, dtype=torch.int32, device=bench.device)
    seconds = bench.time(
        lambda: latent_attention(
            q_THE, cache, tables, lengths, rank=512, max_query=1, scale=192**-0.5
        )
    ).median_s
    copied = torch.empty_like(cache)
    copy_s = bench.time(lambda: copied.copy_(cache)).median_s
    return Check(
        what=Words(
            "rate of the decode kernel over a copy's, at least",
            "decode kernel 的带宽/拷贝带宽（至少）",
        ),
        predicted=0.6,
        measured=copy_s / (2 * seconds),
        unit="x",
        kind="at_least",
    )


def _plot(slow: Points, fast: Points) -> Plot:
    return Plot(
        title=Words("One decoded token, one layer", "单 token、单层"),
        x=Words("tokens of context", "上下文 token 数"),
        y=Words("milliseconds", "毫秒"),
        lines={"expanded": slow, "absorbed": fast},
        log_x=True,
        log_y=True,
    )


def _table() -> Table:
    """Numbers cached for one token in one layer."""
    shapes = {"DeepSeek-V3 (128 heads of 128)": (128, 128, 512, 64), "this lab": (16, 96, 128, 32)}
    return Table(
        columns=[
            Words("shape", "形状"),
            Words("MHA", "MHA"),
            Words("MLA", "MLA"),
            Words("MHA over MLA", "MHA/MLA"),
        ],
        rows=[
            [name, 2 * heads * size, rank + rotated, 2 * heads * size / (rank + rotated)]
            for name, (heads, size, rank, rotated) in shapes.items()
        ],
    )


LAB = described(__file__, run)
