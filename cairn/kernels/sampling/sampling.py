"""The next token of every row: greedy, or drawn after temperature, top-k, top-p and min-p; no sort, no host sync.

In this order, as the plain generator does it:

    mask, penalties     where given (`penalties` says how)
    temperature         scores = logits / temperature; 0: the most likely token, the first of equals
    top-k               whatever is less than the k-th largest score goes; equals of the k-th stay; 0: all stay
    top-p               of the softmax over what is left: a token stays if those before it have less than p together,
                        so the one that crosses p stays. Tokens of equal score stay or go together
    min-p               what has less than min_p times the probability of the likeliest token goes
    draw                the largest of score + noise, with Gumbel noise: a draw from the softmax over what is left

Noise is a function of (seed, position, token) alone: the same request gets the same tokens in any batch. Parameters
are tensors on the GPU, one element for each row of state, so a CUDA graph replays with others. A NaN counts as -inf;
where no token is left, 0 is chosen. Bytes moved: the logits once and a sample of them, or twice for top-p alone.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.kernels.arguments import FLOATS, INTEGERS, check, output, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.sampling.noise_reference import noise_reference
from cairn.kernels.sampling.penalties import Penalties, penalize
from cairn.kernels.tuned import tuned

CANDIDATES = 4096  # tokens that may be kept, for each row; more than that takes more passes
MOST_PARTS = 64  # of a row
ROOM = 4096  # groups of neighbouring tokens among which they are, for each part of a row
PHASES = {"whole": (True, True), "scan": (True, False), "finish": (False, True)}  # (SCAN, FINISH)


class Parameters(NamedTuple):
    """Sampling parameters of each row of state."""

    temperature_N: Tensor  # float32; 0: the most likely token
    top_k_N: Tensor  # int32; 0: all
    top_p_N: Tensor  # float32; 1: all
    min_p_N: Tensor  # float32; 0: all
    seed_N: Tensor  # int64

    @staticmethod
    def neutral(rows: int, device: torch.device | str) -> "Parameters":
        """Greedy, without restriction, seed 0: buffers to fill in."""
        zeros = torch.zeros(rows, device=device)
        integers = torch.zeros(rows, dtype=torch.int32, device=device)
        return Parameters(zeros, integers, torch.ones_like(zeros), zeros.clone(), integers.long())


def kept_reference(scores_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """Mask [B, V] of tokens that may be sampled; the scores are already divided by the temperature."""
    sorted_BV = scores_BV.sort(descending=True).values
    k_B = torch.where(top_k_B > 0, top_k_B, scores_BV.shape[1]).clamp(max=scores_BV.shape[1]).long()
    kept_BV = scores_BV >= sorted_BV.gather(1, k_B[:, None] - 1)
    weights_BV = scores_BV.masked_fill(~kept_BV, -torch.inf).softmax(-1)
    likeliest_BV = weights_BV.sort(descending=True).values
    before_BV = likeliest_BV.cumsum(-1) - likeliest_BV
    last_B = (before_BV < top_p_B[:, None]).sum(-1).clamp(min=1)  # how many stay
    kept_BV &= (weights_BV >= likeliest_BV.gather(1, last_B[:, None] - 1)) | (top_p_B >= 1)[:, None]
    return kept_BV & (weights_BV >= min_p_B[:, None] * likeliest_BV[:, :1])


def sample_reference(logits_BV: Tensor, parameters: Parameters, position_B: Tensor) -> Tensor:
    """Reference in float64."""
    logits_BV = logits_BV.double().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    temperature_B = parameters.temperature_N.double()
    greedy_B1 = (temperature_B <= 0)[:, None]
    scores_BV = logits_BV / torch.where(greedy_B1, 1.0, temperature_B[:, None])
    limits = (parameters.top_p_N.double(), parameters.min_p_N.double())
    kept_BV = kept_reference(scores_BV, parameters.top_k_N, *limits)
    noise_BV = noise_reference(parameters.seed_N, position_B, logits_BV.shape[1])
    noisy_BV = torch.where(kept_BV, scores_BV + noise_BV, -torch.inf)
    decisive_BV = torch.where(greedy_B1, logits_BV, noisy_BV)
    ids_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    largest_BV = decisive_BV == decisive_BV.amax(-1, keepdim=True)
    return torch.where(largest_BV, ids_V, logits_BV.shape[1]).amin(-1)


def sample(
    logits_BV: Tensor,
    parameters: Parameters,
    position_B: Tensor,
    *,
    rows_B: Tensor | None = None,
    penalties: Penalties | None = None,
    allowed_BW: Tensor | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """A token for each row of logits, [B] int32 (or as `out`).

    `position_B`: at which place of its sequence the token will stand. `rows_B`: which row of state (parameters,
    penalties) belongs to which row of logits, -1 for padding, which gets token 0; None: the same. `allowed_BW`: int32
    words of 32 bits, bit v % 32 of word v // 32 set where token v may be chosen.
    """
    out = _checked(logits_BV, parameters, position_B, rows_B, out)
    offers = {"triton": needs_cuda(logits_BV), "reference": None}
    chosen = choose("sampling", impl, offers).impl
    if penalties is not None or allowed_BW is not None:
        logits_BV = penalize(logits_BV, penalties, rows_B=rows_B, allowed_BW=allowed_BW, impl=impl)
    if chosen == "reference":
        return out.copy_(_by_reference(logits_BV, parameters, position_B, rows_B))
    if logits_BV.shape[0]:
        _launch(logits_BV, parameters, position_B, rows_B, out)
    return out


def _by_reference(
    logits_BV: Tensor, parameters: Parameters, position_B: Tensor, rows_B: Tensor | None
) -> Tensor:
    if rows_B is None:
        return sample_reference(logits_BV, parameters, position_B)
    mine = Parameters(*(tensor[rows_B.clamp(min=0).long()] for tensor in parameters))
    return sample_reference(logits_BV, mine, position_B).masked_fill(rows_B < 0, 0)


def _launch(
    logits_BV: Tensor,
    parameters: Parameters,
    position_B: Tensor,
    rows_B: Tensor | None,
    out: Tensor,
) -> None:
    from cairn.kernels.sampling.sampling_kernel import sample_kernel

    batch, vocabulary = logits_BV.shape
    device = logits_BV.device
    plan = _plan(vocabulary, logits_BV.dtype)
    parts = _parts(batch, vocabulary, plan)
    groups = torch.empty((batch, parts, ROOM), dtype=torch.int32, device=device)
    counts = torch.empty((batch, parts), dtype=torch.int32, device=device)
    columns = torch.empty((batch, CANDIDATES), dtype=torch.int32, device=device)
    values = torch.empty((batch, CANDIDATES), device=device)
    notes = torch.empty((batch, 2), device=device)
    kernel: Any = sample_kernel
    for name in ("scan", "finish") if parts > 1 else ("whole",):
        constants = _constants(plan, logits_BV.dtype, rows_B is not None, PHASES[name])
        kernel[(batch, parts if name == "scan" else 1)](
            logits_BV, out, *parameters, position_B, out if rows_B is None else rows_B, groups, counts, columns, values,
            notes, logits_BV.stride(0), vocabulary, parts, **constants, **plan.options(PHASES[name]),
        )  # fmt: skip


class Plan(NamedTuple):
    """Launch parameters; the tuned tables have the same fields."""

    lanes: int = 8192  # columns of a step
    warps: int = 8
    scan_warps: int = 16  # of a program that scans a part of a row
    programs: int = 264  # that share the rows, where there are fewer rows

    def options(self, phase: tuple[bool, bool]) -> dict[str, int]:
        """Two programs fit a multiprocessor."""
        warps = self.scan_warps if phase == PHASES["scan"] else self.warps
        return {"num_warps": warps, "maxnreg": 1024 // warps}


def _usual(dtype: torch.dtype) -> Plan:
    return Plan(lanes=16384 // dtype.itemsize)


def _plan(vocabulary: int, dtype: torch.dtype) -> Plan:
    return Plan(**tuned("sampling", _key(vocabulary, dtype), _usual(dtype)._asdict()))


def _parts(batch: int, vocabulary: int, plan: Plan) -> int:
    """Programs for each row: no less than a step for each, and none without a column."""
    tiles = -(-vocabulary // plan.lanes)
    wanted = max(1, min(plan.programs // batch, tiles, MOST_PARTS))
    return -(-tiles // -(-tiles // wanted))


def _key(vocabulary: int, dtype: torch.dtype) -> str:
    return f"vocabulary={vocabulary},{short(dtype)}"


def _constants(
    plan: Plan, dtype: torch.dtype, rows: bool, phase: tuple[bool, bool]
) -> dict[str, Any]:
    shift = 16 if dtype == torch.bfloat16 else 13 if dtype == torch.float16 else 0
    scan, finish = phase
    return dict(LANES=plan.lanes, GROUP=16 // dtype.itemsize, ROOM=ROOM, CANDIDATES=CANDIDATES,
                SHIFT=shift, ROWS=rows, SCAN=scan, FINISH=finish)  # fmt: skip


def _checked(
    logits_BV: Tensor,
    parameters: Parameters,
    position_B: Tensor,
    rows_B: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    check("logits", logits_BV, dtypes=FLOATS, shape=(None, None))
    batch, vocabulary = logits_BV.shape
    require(vocabulary > 0, "logits", "at least one token", f"{vocabulary}")
    require(
        logits_BV.stride(1) == 1 or vocabulary == 1,
        "logits",
        "stride 1 in the last dimension",
        logits_BV.stride(),
    )
    check("position", position_B, dtypes=INTEGERS, shape=(batch,), beside=logits_BV, packed=True)
    states = batch if rows_B is None else None
    if rows_B is not None:
        check("rows", rows_B, dtypes=INTEGERS, shape=(batch,), beside=logits_BV, packed=True)
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64)
    for name, tensor, kind in zip(Parameters._fields, parameters, kinds, strict=True):
        name = name.removesuffix("_N")
        check(name, tensor, dtypes=(kind,), shape=(states,), beside=logits_BV, packed=True)
        states = tensor.shape[0] if states is None else states
    kind = out.dtype if out is not None and out.dtype in INTEGERS else torch.int32
    return output("out", out, (batch,), kind, logits_BV)


def cost(batch: int, vocabulary: int, bytes_each: int = 2) -> Cost:
    """The logits once; that a restriction needs a second look is our affair."""
    return Cost(flops=float(batch * vocabulary), bytes=float(batch * (vocabulary * bytes_each + 4)))


class Batch(NamedTuple):
    logits_BV: Tensor
    parameters: Parameters
    position_B: Tensor
    out_B: Tensor


def random_batch(
    batch: int,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    device: str = "cuda",
) -> Batch:
    """Logits with a few likely tokens and a long tail, as a model's."""
    logits_BV = 2.5 * torch.randn(batch, vocabulary, device=device).abs().pow(1.2)
    blank = Parameters.neutral(batch, device)
    blank.temperature_N.fill_(temperature)
    blank.top_k_N.fill_(top_k)
    blank.top_p_N.fill_(top_p)
    blank.min_p_N.fill_(min_p)
    blank.seed_N.copy_(torch.randint(2**62, (batch,), device=device))
    position_B = torch.randint(4096, (batch,), dtype=torch.int32, device=device)
    return Batch(logits_BV.to(dtype), blank, position_B, torch.empty_like(position_B))
