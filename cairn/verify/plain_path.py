"""The plain float32 path of a model, as it is and under a hypothesis: what the log-probabilities should be.

The model is loaded once. A hypothesis about the spec builds the model again around the same parameters, which costs no
memory; one about the weights rounds a copy of the matrices. A text that is longer than a window is read once up to the
first token that the window hides from anybody: all that hypotheses about windows change comes behind it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import msgspec
import torch
from torch import Tensor, nn

from cairn.models.attend import Cached, KVCache, PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.linear.form import Epilogue, Product
from cairn.models.linear.maps import Linear, linears
from cairn.models.linear.packed import GROUP, INT8_MOST, Levels, saturates
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer
from cairn.verify.evidence import Observation, Row
from cairn.verify.hypotheses import Hypothesis
from cairn.verify.misplaced_weights import rearranged
from cairn.verify.probes import TOP

SHORTEST_PREFIX = 64  # tokens that are worth being kept for the next hypothesis
INT4_MOST, WIDE_GROUP = 7, 128
OUTLIERS = 8  # columns of what enters a product that CPU engines do not round


class ProbePrompt(NamedTuple):
    """The tokens that are run, and the first of them that is scored."""

    ids: list[int]
    first: int
    unseen: int = 0  # scored tokens that nothing comes before any more


class PlainPath:
    def __init__(self, model: Transformer) -> None:
        """`model`: in float32, not fused."""
        self.model = model
        self._prefix: tuple[list[int], KVCache] | None = None  # the tokens, and what they left

    def expected(
        self, observed: Iterable[Observation], hypothesis: Hypothesis | None = None
    ) -> list[Observation]:
        """The same probes as this path computes them: rows have the tokens observed there and the likeliest ones."""
        model = self.model if hypothesis is None else self._under(hypothesis)
        return [self._one(model, one, hypothesis) for one in observed]

    def _under(self, hypothesis: Hypothesis) -> Transformer:
        if hypothesis.spec is not None:
            return with_spec(self.model, hypothesis.spec)
        if hypothesis.misplaced is not None:
            model = self.model
            state = rearranged(model.state_dict(), model.spec, hypothesis.misplaced)
            return with_spec(model, model.spec, state)
        made = self._rounded(hypothesis)
        return with_rounded_inputs(made) if hypothesis.rounds_inputs else made

    def _rounded(self, hypothesis: Hypothesis) -> Transformer:
        if hypothesis.bits is None:
            return self.model
        return rounded(self.model, hypothesis.bits, hypothesis.wide)

    def _one(
        self, model: Transformer, observed: Observation, hypothesis: Hypothesis | None
    ) -> Observation:
        ids, first = observed.ids, observed.first
        prompt = prompt_of(observed, hypothesis)
        keeps_weights = hypothesis is None or hypothesis.spec is not None
        shared = seen_by_all(self.model.spec, model.spec) if keeps_weights else 0
        logprobs_RV = self._score(model, prompt, min(shared, prompt.first - 1))
        rows = [*[{}] * prompt.unseen, *_rows(logprobs_RV, observed.rows[prompt.unseen :])]
        return Observation(observed.probe, ids, first, rows)

    def _score(self, model: Transformer, prompt: ProbePrompt, shared: int) -> Tensor:
        """Score a prompt; the first `shared` tokens do not depend on the hypothesis and are computed once."""
        if shared < SHORTEST_PREFIX:
            return score(model, prompt.ids, prompt.first)
        ids = prompt.ids[:shared]
        if self._prefix is None or self._prefix[0] != ids:
            self._prefix = ids, read(self.model, ids, len(prompt.ids))
        return score_behind(model, self._prefix[1], prompt.ids, prompt.first)


def seen_by_all(spec: ModelSpec, other: ModelSpec) -> int:
    """Number of leading tokens that both specs compute equally, because every window includes the first token.

    0 if the two differ in more than their windows, if a layer rotates otherwise because of its window, or if there is
    no window.
    """
    rotate_alike = all(spec.rope_of(at) == other.rope_of(at) for at in range(spec.layers))
    if not rotate_alike or msgspec.structs.replace(other, windows=spec.windows) != spec:
        return 0
    # One less: the next hypothesis may have a window that is too narrow.
    return max(min((w for w in (*spec.windows, *other.windows) if w), default=0) - 2, 0)


def prompt_of(observed: Observation, hypothesis: Hypothesis | None) -> ProbePrompt:
    """The tokens to run. In a chat only the answer is scored, so all tokens before it are replaced."""
    if hypothesis is None or hypothesis.ids is None:
        return ProbePrompt(observed.ids, observed.first)
    if hypothesis.probe:
        before = hypothesis.ids(observed.ids[: observed.first])
        return ProbePrompt([*before, *observed.ids[observed.first :]], len(before))
    ids = hypothesis.ids(observed.ids)
    first = observed.first + len(ids) - len(observed.ids)
    unseen = max(1 - first, 0)
    return ProbePrompt(ids, first + unseen, unseen)


@torch.inference_mode()
def score(model: Transformer, ids: Sequence[int], first: int) -> Tensor:
    """Log-probabilities of every token at each of the places `first`.., [R, V], in float32."""
    device = model.embedding.weight.device
    tokens_T = torch.tensor(ids[:-1], dtype=torch.long, device=device)
    attend = PackedDocuments([len(tokens_T)], device)
    hidden_TD = model(tokens_T, attend.positions_T(), attend)
    return model.logits(hidden_TD[first - 1 :]).float().log_softmax(-1).cpu()


@torch.inference_mode()
def read(model: Transformer, ids: Sequence[int], capacity: int) -> KVCache:
    """The cache of a model that has read these tokens, with room for more."""
    weight = model.embedding.weight
    cache = KVCache(model.spec, capacity, model.build.dtype, weight.device)
    attend = Cached([cache], [len(ids)])
    model(torch.tensor(ids, device=weight.device), attend.positions_T(), attend)
    attend.commit()
    return cache


@torch.inference_mode()
def score_behind(model: Transformer, cache: KVCache, ids: Sequence[int], first: int) -> Tensor:
    """Score a text whose beginning is in the cache; the cache does not advance."""
    rest = ids[cache.length : -1]
    attend = Cached([cache], [len(rest)])
    tokens_T = torch.tensor(rest, device=attend.device)
    hidden_TD = model(tokens_T, attend.positions_T(), attend)
    rows_RD = hidden_TD[first - 1 - cache.length :]
    return model.logits(rows_RD).float().log_softmax(-1).cpu()


def _rows(logprobs_RV: Tensor, observed: Sequence[Row]) -> list[Row]:
    """The most likely tokens and the observed tokens at each position."""
    likeliest = logprobs_RV.topk(min(TOP, logprobs_RV.shape[1]), dim=1)
    made = [
        dict(zip(tokens, values, strict=True))
        for tokens, values in zip(
            likeliest.indices.tolist(), likeliest.values.tolist(), strict=True
        )
    ]
    rows = [row for row, seen in enumerate(observed) for _ in seen]
    tokens = [token for seen in observed for token in seen]
    values = logprobs_RV[rows, tokens].tolist() if rows else []
    for row, token, value in zip(rows, tokens, values, strict=True):
        made[row][token] = value
    return made


def with_spec(
    model: Transformer, spec: ModelSpec, state: dict[str, Tensor] | None = None
) -> Transformer:
    """The same parameters, or those of `state`, in a model of another spec."""
    build = ModelBuild("meta", model.build.dtype, model.build.shards, model.build.fused)
    made = Transformer(spec, build)
    made.load_state_dict(model.state_dict() if state is None else state, assign=True)
    return made.eval()


@torch.inference_mode()
def rounded(model: Transformer, bits: str, wide: bool = False) -> Transformer:
    """A copy whose matrices are rounded to so many bits; in bfloat16 the whole model computes."""
    made = with_spec(model, model.spec)
    if bits == "bfloat16":
        return made.to(torch.bfloat16)
    for part in linears(made):
        if part is made.embedding:
            continue
        for owner in part.owners():
            weight_NK = cast(Tensor, owner.weight)
            owner.weight = nn.Parameter(_rounded(weight_NK, bits, wide), requires_grad=False)
    return made


@torch.inference_mode()
def with_rounded_inputs(model: Transformer) -> Transformer:
    """Model with inputs rounded to 8 bits, as CPU matmuls with packed weights compute."""
    made = with_spec(model, model.spec)
    for part in linears(made):
        if part is not made.embedding:
            part.take(Rounded8BitInputs(part))
    return made


class Rounded8BitInputs:
    """A form that multiplies as the parameters do, with what enters it rounded."""

    nbytes = 0

    def __init__(self, part: Linear) -> None:
        self.part = part

    def covers(self, rows: int) -> bool:
        return True

    def product(self, x_MK: Tensor, bias_N: Tensor | None, epilogue: Epilogue) -> Product:
        return self.part._float(in_few_bits(x_MK), epilogue, biased=True)

    def after(self, weight_K: Tensor) -> None:
        return None


def in_few_bits(x_MK: Tensor) -> Tensor:
    """Each token by its own range, but for the columns that are much larger than the rest in every trained model.

    In 8 bits, and in 7 where this CPU's sums of 8-bit products would overflow.
    """
    most = INT8_MOST // 2 if saturates() else INT8_MOST
    largest = x_MK.abs().amax(0).topk(min(OUTLIERS, x_MK.shape[1] // 2)).indices
    kept_MK = torch.zeros_like(x_MK).index_copy_(1, largest, x_MK[:, largest])
    rest_MK = x_MK - kept_MK
    step_M1 = rest_MK.abs().amax(1, keepdim=True).clamp(min=1e-12) / most
    return kept_MK + (rest_MK / step_M1).round() * step_M1


def _rounded(weight_NK: Tensor, bits: str, wide: bool) -> Tensor:
    rows, columns = weight_NK.shape
    if bits == "int4" and not wide and columns % GROUP == 0:
        return Levels(weight_NK).weight_NK()
    # A row is one group, or for 4 bits several of up to 128.
    group = math.gcd(columns, WIDE_GROUP) if bits == "int4" else columns
    most = INT4_MOST if bits == "int4" else INT8_MOST
    w_NGE = weight_NK.view(rows, columns // group, group)
    step_NG1 = w_NGE.abs().amax(2, keepdim=True).clamp(min=1e-12) / most
    return ((w_NGE / step_NG1).round() * step_NG1).view(rows, columns)
