"""Keys and values as one small latent per token: what is cached, and why the answer stays the same.

    MHA    cache k, v of every head                      2 x heads x size
    GQA    cache k, v of a few heads                     2 x kv_heads x size
    MLA    cache c = W_down x (and one rotary key)       latent + rotary
           k_h = U_h c, so q_h . k_h = (U_h^T q_h) . c   the up-projection moves to the query: nothing is unpacked

Both ways to compute it are the engine's own: `models.latent` unpacks and absorbs, and `latent_attention` attends over
pages of latents, by its kernel where there is a GPU. They have to agree. No rotation is applied to the latent part,
which is why absorbing is allowed at all.
"""

from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench
from cairn.models.spec import Latent, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.models.latent import Expansion

HEADS, SIZE, LATENT, ROTARY, PAGE = 16, 64, 128, 32, 16
SCALE = (SIZE + ROTARY) ** -0.5
SIZES = Latent(rank=LATENT, unrotated=SIZE, rotated=ROTARY, value=SIZE)
SPEC = ModelSpec(
    family="deepseek_v2",
    vocab=512,
    hidden=256,
    layers=1,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=SIZE + ROTARY,
    intermediate=256,
    context=8192,
    mixer="latent",
    latent=SIZES,
)


# heads, KV heads, size of a head, latent, rotary
MODELS = {
    "DeepSeek-V3 (128 heads of 128)": (128, 8, 128, 512, 64),
    "this lab": (HEADS, 4, SIZE, LATENT, ROTARY),
}


class Given(NamedTuple):
    """One query of every head, and the pages of a sequence."""

    q_1HC: "Tensor"
    cache: "Tensor"  # [pages, PAGE, 1, latent + rotary], in the order of the tokens
    tables: "Tensor"
    lengths: "Tensor"
    expansion: "Expansion"


def unpacked(given: Given) -> "Tensor":
    """Keys and values of every head are made from the latents first, as in training."""
    from cairn.models.attend import Rule, attention

    rows_NE = given.cache.flatten(0, 2)
    return attention(given.q_1HC, *given.expansion.expanded(rows_NE), Rule(0, SCALE))


def absorbed(given: Given) -> "Tensor":
    """Queries go down to the latent, values come up once at the end: only the latents are read."""
    from cairn.kernels.paged.latent_attention import latent_attention

    out_1HR = latent_attention(
        given.expansion.absorbed(given.q_1HC),
        given.cache,
        given.tables,
        given.lengths,
        rank=LATENT,
        max_query=1,
        scale=SCALE,
    )
    return given.expansion.restored(out_1HR)


def expansion(device: str) -> "Expansion":
    import torch

    from cairn.models.build import Build
    from cairn.models.latent import Expansion

    made = Expansion(Build(device, torch.float32), SPEC, SIZES).requires_grad_(False)
    made.weight.normal_(0, 1 / 8, generator=torch.Generator(device).manual_seed(1))
    return made


def given_of(made: "Expansion", length: int) -> Given:
    import torch

    device = made.weight.device
    draw = torch.Generator(device).manual_seed(length)
    pages = length // PAGE
    cache = torch.randn(pages, PAGE, 1, LATENT + ROTARY, generator=draw, device=device)
    query_1HC = torch.randn(1, HEADS, SIZE + ROTARY, generator=draw, device=device)
    tables = torch.arange(pages, dtype=torch.int32, device=device)[None]
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    return Given(query_1HC, cache, tables, lengths, made)


def values_of(kind: str, heads: int, kv_heads: int, size: int, latent: int, rotary: int) -> int:
    """Numbers cached for one token in one layer."""
    return {"MHA": 2 * heads * size, "GQA": 2 * kv_heads * size, "MLA": latent + rotary}[kind]


@one_thread()
def run(bench: Workbench) -> Outcome:
    made = expansion(bench.device)
    given = given_of(made, 304)
    apart = float((unpacked(given) - absorbed(given)).abs().max())
    slow, fast = [], []
    for length in bench.pick((512, 2048, 8192), (512, 2048)):
        bench.step(f"one token over {length} latents")
        inputs = [(given_of(made, length),)]
        for line, form in ((slow, unpacked), (fast, absorbed)):
            timing = bench.time(form, inputs, budget_ms=150)
            line.append((float(length), timing.p10_s * 1e3))
    checks = _same(apart, shrunk(given))
    if not bench.on_gpu:  # where so little work is all launches
        checks.append(_faster(slow[-1], fast[-1]))
    return Outcome(checks=checks, plots=[_plot(slow, fast)], table=_table())


def shrunk(given: Given) -> float:
    """Bytes of the keys and values that were unpacked over those that are kept."""
    k_NHC, v_NHV = given.expansion.expanded(given.cache.flatten(0, 2))
    return (k_NHC[..., :SIZE].numel() + v_NHV.numel()) / given.cache.numel()


def _same(apart: float, ratio: float) -> list[Check]:
    shape = MODELS["this lab"]
    return [
        Check(
            what=Words("difference between unpacked and absorbed", "展开与吸收两种算法之差"),
            predicted=1e-4,
            measured=apart,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "bytes of unpacked keys and values over those that MLA keeps",
                "展开后的 K、V 与 MLA 实际缓存的字节之比",
            ),
            predicted=values_of("MHA", *shape) / values_of("MLA", *shape),
            measured=ratio,
            unit="x",
            within=1e-9,
        ),
    ]


def _faster(slow: tuple[float, float], fast: tuple[float, float]) -> Check:
    """FLOPs of one token: unpacking every key and value again, against two products with the latents."""
    flops_slow = 2 * 2 * HEADS * SIZE * LATENT + 4 * HEADS * SIZE
    flops_fast = 4 * HEADS * LATENT
    return Check(
        what=Words(
            f"unpacked over absorbed, time at {slow[0]:.0f} tokens",
            f"{slow[0]:.0f} token 时展开/吸收的时间比，至少",
        ),
        predicted=0.2 * flops_slow / flops_fast,
        measured=slow[1] / fast[1],
        unit="x",
        kind="at_least",
    )


def _plot(slow: Points, fast: Points) -> Plot:
    return Plot(
        title=Words("One decoded token, one layer", "单 token、单层"),
        x=Words("tokens of context", "上下文 token 数"),
        y=Words("milliseconds", "毫秒"),
        lines={"unpacked": slow, "absorbed": fast},
        log_x=True,
        log_y=True,
    )


def _table() -> Table:
    return Table(
        columns=[
            Words("shape", "形状"),
            Words("MHA", "MHA"),
            Words("GQA, 8 or 4 KV heads", "GQA（8 或 4 个 KV 头）"),
            Words("MLA", "MLA"),
            Words("MHA over MLA", "MHA/MLA"),
        ],
        rows=[
            [
                name,
                *(values_of(kind, *shape) for kind in ("MHA", "GQA", "MLA")),
                values_of("MHA", *shape) / values_of("MLA", *shape),
            ]
            for name, shape in MODELS.items()
        ],
    )


LAB = described(__file__, run)
