"""Keys and values as one small latent per token: what is cached, and why the answer stays the same.

    MHA    cache k, v of every head                      2 x heads x size
    GQA    cache k, v of a few heads                     2 x kv_heads x size
    MLA    cache c = W_down x (and one rotary key)       latent + rotary
           k_h = U_h c, so q_h . k_h = (U_h^T q_h) . c   the up-projection moves to the query: nothing is unpacked

Both ways to compute it are here (unpack everything; absorb), in float64, and have to agree. No rotation is applied to
the latent part, which is why absorbing is allowed at all.
"""

from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Generator, Tensor

HEADS, SIZE, LATENT, ROTARY = 16, 64, 128, 32


# heads, KV heads, size of a head, latent, rotary
MODELS = {
    "DeepSeek-V3 (128 heads of 128)": (128, 8, 128, 512, 64),
    "this lab": (HEADS, 4, SIZE, LATENT, ROTARY),
}


class Weights(NamedTuple):
    up_k_HCL: "Tensor"  # latent -> keys of a head
    up_v_HCL: "Tensor"


def unpacked(
    q_HC: "Tensor", turned_HR: "Tensor", c_NL: "Tensor", key_NR: "Tensor", w: Weights
) -> "Tensor":
    """Keys and values of every head are made from the latents first, as in training."""
    import torch

    k_HNC = torch.einsum("hcl,nl->hnc", w.up_k_HCL, c_NL)
    v_HNC = torch.einsum("hcl,nl->hnc", w.up_v_HCL, c_NL)
    scores_HN = torch.einsum("hc,hnc->hn", q_HC, k_HNC) + turned_HR @ key_NR.t()
    weights_HN = (scores_HN * (SIZE + ROTARY) ** -0.5).softmax(-1)
    return torch.einsum("hn,hnc->hc", weights_HN, v_HNC)


def absorbed(
    q_HC: "Tensor", turned_HR: "Tensor", c_NL: "Tensor", key_NR: "Tensor", w: Weights
) -> "Tensor":
    """Queries go down to the latent, values come up once at the end: only the latents are read."""
    import torch

    low_HL = torch.einsum("hc,hcl->hl", q_HC, w.up_k_HCL)
    scores_HN = low_HL @ c_NL.t() + turned_HR @ key_NR.t()
    weights_HN = (scores_HN * (SIZE + ROTARY) ** -0.5).softmax(-1)
    return torch.einsum("hl,hcl->hc", weights_HN @ c_NL, w.up_v_HCL)


def values_of(kind: str, heads: int, kv_heads: int, size: int, latent: int, rotary: int) -> int:
    """Numbers cached for one token in one layer."""
    return {"MHA": 2 * heads * size, "GQA": 2 * kv_heads * size, "MLA": latent + rotary}[kind]


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    draw = torch.Generator().manual_seed(1)
    w = Weights(*(drawn(draw, HEADS, SIZE, LATENT) / 8 for _ in range(2)))
    inputs = inputs_of(draw, 300)
    apart = float((unpacked(*inputs, w) - absorbed(*inputs, w)).abs().max())
    small = Weights(*(part.float() for part in w))
    slow, fast = [], []
    for length in bench.pick((512, 2048, 8192), (512, 2048)):
        bench.step(f"one token over {length} latents")
        given = [(*(one.float() for one in inputs_of(draw, length)), small)]
        for line, form in ((slow, unpacked), (fast, absorbed)):
            timing = bench.time(form, given, device="cpu", budget_ms=150)
            line.append((float(length), timing.p10_s * 1e3))
    return Outcome(
        checks=[*_same(apart, shrunk(inputs, w)), _faster(slow[-1], fast[-1])],
        plots=[_plot(slow, fast)],
        table=_table(),
    )


def drawn(draw: "Generator", *shape: int) -> "Tensor":
    import torch

    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def inputs_of(draw: "Generator", length: int) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """A query's two parts, and the latents and rotary keys of so many tokens."""
    query_HC, turned_HR = drawn(draw, HEADS, SIZE), drawn(draw, HEADS, ROTARY)
    return query_HC, turned_HR, drawn(draw, length, LATENT), drawn(draw, length, ROTARY)


def shrunk(inputs: "tuple[Tensor, Tensor, Tensor, Tensor]", w: Weights) -> float:
    """Bytes of the keys and values that were unpacked over those that are kept."""
    import torch

    k_HNC, v_HNC = (torch.einsum("hcl,nl->hnc", up, inputs[2]) for up in w)
    return (k_HNC.nbytes + v_HNC.nbytes) / (inputs[2].nbytes + inputs[3].nbytes)


def _same(apart: float, ratio: float) -> list[Check]:
    shape = MODELS["this lab"]
    return [
        Check(
            what=Words("difference between unpacked and absorbed", "展开与吸收两种算法之差"),
            predicted=1e-10,
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
