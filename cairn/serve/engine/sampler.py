"""Sampling of the next token of each request: parameters by row on the device, plus optional features.

    common    temperature, top-k, top-p, min-p, seed: one kernel, inside a CUDA graph
    special   penalties, logit bias, min_tokens, grammars: the logits are changed first, outside of graphs

A draw is a function of the request's seed, the position and the logits alone, so the same request gets the same tokens
in any batch. Log-probabilities are those of the raw logits. Rows are set when a request gets one; all tensors are made
once, because graphs keep their addresses, but for the counts of penalties, which are made when first asked for, and
what single rows ask for (`Special`), which is made when they are set: a step only adds it up.
"""

import secrets
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.sampling.logprobs import logprobs, packed_size, views_of
from cairn.kernels.sampling.penalties import Penalties, count, penalize, words
from cairn.kernels.sampling.sampling import Parameters, sample
from cairn.serve.engine.constraint import Constraint
from cairn.serve.engine.cpu_sampling import sample_on_cpu
from cairn.serve.engine.request import Request, is_penalised, special

TURNS = 4  # pinned mirrors, as of the batch
ROW_BYTES = 36  # of a mirror: a seed and seven numbers


class Mirror(NamedTuple):
    """Parameters of all rows on the host; one buffer, so that one copy sends them all."""

    bytes: Tensor
    seed_N: np.ndarray
    temperature_N: np.ndarray
    top_p_N: np.ndarray
    min_p_N: np.ndarray
    repetition_N: np.ndarray
    presence_N: np.ndarray
    frequency_N: np.ndarray
    top_k_N: np.ndarray


class Changes(NamedTuple):
    """Sparse changes of a row's logits, on the device."""

    token_C: Tensor
    added_C: Tensor


class Special(NamedTuple):
    """Optional sampling features of a row's request."""

    bias: Changes | None
    not_yet: Changes | None  # what would end an answer that is short of min_tokens
    not_yet_W: np.ndarray | None  # the same as a mask of all other tokens, where a grammar has one


class Draw(NamedTuple):
    """A token to sample for a request."""

    request: Request
    index: int  # which of its outputs it will be
    mask_W: np.ndarray | None  # what its grammar allows there

    @property
    def is_short(self) -> bool:
        """Must it not end the answer?"""
        return self.index < self.request.min_tokens


class Runs:
    """Samples of a step with drafts by depth: depth d follows a request's d-th draft."""

    def __init__(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> None:
        self.requests, self.drafts = requests, drafts
        self.longest = 1 + max(map(len, drafts))
        self._first = [0, *np.cumsum([1 + len(guessed) for guessed in drafts]).tolist()]
        self._followed = {  # by a grammar that goes ahead with the drafts
            i: request.constraint.copy()
            for i, request in enumerate(requests)
            if request.constraint is not None and drafts[i]
        }

    def at_depth(self, depth: int) -> list[int]:
        return [i for i, guessed in enumerate(self.drafts) if len(guessed) >= depth]

    def places(self, depth: int) -> list[int]:
        return [self._first[i] + depth for i in self.at_depth(depth)]

    def next_drafts(self, depth: int) -> list[int]:
        """The draft that the draw has to equal; -1 behind the last one."""
        guesses = [self.drafts[i] for i in self.at_depth(depth)]
        return [guessed[depth] if len(guessed) > depth else -1 for guessed in guesses]

    def draws(self, depth: int) -> list[Draw]:
        """Call it for one depth after another: grammars follow the drafts."""
        return [self._draw(i, depth) for i in self.at_depth(depth)]

    def every_draw(self) -> list[Draw]:
        """All samples in the order of the step."""
        depths = [(i, depth) for i, own in enumerate(self.drafts) for depth in range(1 + len(own))]
        return [self._draw(i, depth) for i, depth in depths]

    def _draw(self, i: int, depth: int) -> Draw:
        request, drafts = self.requests[i], self.drafts[i]
        index = _drawn_last(request) - len(drafts) + depth
        if depth == 0:
            return Draw(request, index, _mask(request.constraint))
        ahead = self._followed.get(i)
        if ahead is not None and ahead.accept(drafts[depth - 1]) is not None:
            del self._followed[i]  # it allows no such draft, so this one will not be drawn either
            ahead = None
        return Draw(request, index, _mask(ahead))


class Sampler:
    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        self.rows, self.vocabulary, self.device = rows, vocabulary, torch.device(device)
        pinned = self.device.type == "cuda"
        self._mirrors = [_mirror(rows, pinned) for _ in range(TURNS)]
        self._turn, self._dirty = 0, False
        self._on_device = torch.zeros(ROW_BYTES * rows, dtype=torch.uint8, device=device)
        self.parameters = _parameters(self._on_device, rows)
        self._penalties: Penalties | None = None
        self._special: dict[int, Special] = {}  # by row

    def admit(self, request: Request) -> None:
        """The request has got a row: its parameters are in place before its first sample."""
        if not self._dirty:
            self._turn, self._dirty = (self._turn + 1) % TURNS, True
            before = self._mirrors[self._turn - 1].bytes
            self._mirrors[self._turn].bytes.copy_(before)
        mirror, params, row = self._mirrors[self._turn], request.params, request.row
        mirror.temperature_N[row], mirror.top_p_N[row] = params.temperature, params.top_p
        mirror.min_p_N[row], mirror.top_k_N[row] = params.min_p, params.top_k
        mirror.seed_N[row] = secrets.randbits(63) if params.seed is None else params.seed
        mirror.repetition_N[row] = params.repetition_penalty
        mirror.presence_N[row] = params.presence_penalty
        mirror.frequency_N[row] = params.frequency_penalty
        if is_penalised(params):
            self._start_counts(request)
        self._special.pop(row, None)
        if params.logit_bias or request.min_tokens:
            self._special[row] = self._special_of(request)

    def _special_of(self, request: Request) -> Special:
        biases, ends = request.params.logit_bias or {}, request.eos_ids | request.stop_ids
        bias = self._changes(biases, [*biases.values()]) if biases else None
        if not request.min_tokens or not ends:
            return Special(bias, None, None)
        if request.constraint is not None:
            return Special(bias, None, ~_bits([*ends], self.vocabulary))
        return Special(bias, self._changes(ends, [-torch.inf] * len(ends)), None)

    def _changes(self, tokens: Collection[int], added: Sequence[float]) -> Changes:
        return Changes(self._sent([*tokens], torch.int64), self._sent(added, torch.float32))

    def flush(self) -> None:
        """Send the parameters of new rows, if there are any."""
        if self._dirty:
            self._on_device.copy_(self._mirrors[self._turn].bytes, non_blocking=True)
            self._dirty = False

    def sample(self, logits_SV: Tensor, position_S: Tensor, rows_S: Tensor) -> Tensor:
        """The common way: [S] int32."""
        choose = sample if logits_SV.is_cuda else sample_on_cpu
        return choose(logits_SV, self.parameters, position_S, rows_B=rows_S)

    def sample_special(
        self,
        logits_SV: Tensor,
        position_S: Tensor,
        rows_S: Tensor,
        tokens_S: Tensor,
        requests: Sequence[Request],
        drafts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Draw again for who wants more than the common parameters, in place of what `sample` has drawn.

        `drafts`: as `Step.drafts`.
        """
        if drafts:
            tokens_S.copy_(self._sample_runs(logits_SV, position_S, rows_S, Runs(requests, drafts)))
            return
        at = [s for s, request in enumerate(requests) if special(request)]
        draws = [Draw(r, _drawn_last(r), _mask(r.constraint)) for r in (requests[s] for s in at)]
        if len(at) == len(requests):
            tokens_S.copy_(self._sample_each(logits_SV, position_S, rows_S, draws, rows_S))
            return
        at_S = self._sent(at, torch.int64)
        mine_S = rows_S[at_S]
        tokens_S[at_S] = self._sample_each(logits_SV[at_S], position_S[at_S], mine_S, draws, mine_S)

    def _sample_runs(
        self, logits_SV: Tensor, position_S: Tensor, rows_S: Tensor, runs: "Runs"
    ) -> Tensor:
        """Sample all draws; with penalties by depth, because a penalty counts the preceding drafts."""
        if not any(is_penalised(request.params) for request in runs.requests):
            return self._sample_each(logits_SV, position_S, rows_S, runs.every_draw(), rows_S)
        tokens_S = torch.zeros(len(rows_S), dtype=torch.int32, device=self.device)
        holds_R = torch.ones(len(runs.requests), dtype=torch.bool, device=self.device)
        for depth in range(runs.longest):
            who = self._sent(runs.at_depth(depth), torch.int64)
            at = self._sent(runs.places(depth), torch.int64)
            rows = rows_S[at]
            counted = torch.where(
                holds_R[who], rows, -1
            )  # behind a draft that does not hold nothing counts
            drawn_S = self._sample_each(
                logits_SV[at], position_S[at], rows, runs.draws(depth), counted
            )
            tokens_S[at] = drawn_S
            guessed = self._sent(runs.next_drafts(depth), torch.int32)
            holds_R[who] &= drawn_S == guessed
        return tokens_S

    def _sample_each(
        self,
        logits_SV: Tensor,
        position_S: Tensor,
        rows_S: Tensor,
        draws: Sequence["Draw"],
        counted_S: Tensor,
    ) -> Tensor:
        """Sample one token for each row; `counted_S`: rows whose penalties count it, -1 elsewhere."""
        scores_SV = self._biased(logits_SV, draws)
        penalised = [is_penalised(draw.request.params) for draw in draws]
        penalties = self._penalties if any(penalised) else None
        allowed_SW = self._allowed(draws)
        if scores_SV.is_cuda:
            tokens_S = sample(
                scores_SV,
                self.parameters,
                position_S,
                rows_B=rows_S,
                penalties=penalties,
                allowed_BW=allowed_SW,
            )
        else:
            penalised_SV = penalize(scores_SV, penalties, rows_B=rows_S, allowed_BW=allowed_SW)
            tokens_S = sample_on_cpu(penalised_SV, self.parameters, position_S, rows_B=rows_S)
        if penalties is not None:
            if not all(penalised):
                counted_S = torch.where(self._sent(penalised, torch.bool), counted_S, -1).int()
            count(penalties, tokens_S, counted_S)
        return tokens_S

    def logprobs(self, logits_SV: Tensor, tokens_S: Tensor, n: int) -> Tensor:
        """Log probabilities in the packed format of `views_of`."""
        packed = torch.empty(packed_size(len(tokens_S), n), device=self.device)
        logprobs(logits_SV, tokens_S, n, out=views_of(packed, len(tokens_S), n))
        return packed

    def _allowed(self, draws: "Sequence[Draw]") -> Tensor | None:
        """Token masks [S, W] of the requests' grammars, or None. The device computes logits meanwhile."""
        if all(draw.mask_W is None for draw in draws):
            return None
        shape, pinned = (len(draws), words(self.vocabulary)), self.device.type == "cuda"
        allowed_SW = torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned)
        rows = allowed_SW.numpy()
        for s, draw in enumerate(draws):
            if (mask_W := draw.mask_W) is None:
                continue
            special = self._special.get(draw.request.row)
            if draw.is_short and special is not None and special.not_yet_W is not None:
                fewer_W = mask_W & special.not_yet_W
                mask_W = fewer_W if fewer_W.any() else mask_W  # where they are all that it allows
            rows[s] = mask_W
        return allowed_SW.to(self.device, non_blocking=True)

    def _biased(self, logits_SV: Tensor, draws: "Sequence[Draw]") -> Tensor:
        """Logit bias added in float32, and what must not end a short answer yet ruled out; or the logits."""
        own = [self._special.get(draw.request.row) for draw in draws]
        biases = [(s, one.bias) for s, one in enumerate(own) if one and one.bias]
        not_yet = [
            (s, one.not_yet)
            for s, one in enumerate(own)
            if one and one.not_yet and draws[s].is_short
        ]
        if not biases and not not_yet:
            return logits_SV
        # A copy: log-probabilities need them as they were.
        scores_SV = logits_SV.to(torch.float32, copy=True)
        for changes in (biases, not_yet):
            self._change(scores_SV, changes)
        return scores_SV

    def _change(self, scores_SV: Tensor, changes: Sequence[tuple[int, Changes]]) -> None:
        """Each of a row of its own."""
        if not changes:
            return
        counts = [len(one.token_C) for _, one in changes]
        row_C = self._sent([s for s, _ in changes], torch.int64).repeat_interleave(
            self._sent(counts, torch.int64), output_size=sum(counts)
        )
        token_C = torch.cat([one.token_C for _, one in changes])
        # Not index_put_ with accumulate, which asks the device for the range of the indices; no pair stands twice.
        scores_SV[row_C, token_C] += torch.cat([one.added_C for _, one in changes])

    def _sent(self, values: Sequence[float] | np.ndarray, dtype: torch.dtype) -> Tensor:
        """A tensor on the device. From pinned memory: another copy would wait until the device is idle."""
        on_host = torch.as_tensor(values, dtype=dtype)
        if self.device.type == "cpu":
            return on_host
        return on_host.pin_memory().to(self.device, non_blocking=True)

    def _start_counts(self, request: Request) -> None:
        """Initialise the token counts of a request without synchronising with the device."""
        if self._penalties is None:
            repetition_N, presence_N, frequency_N = _parts(self._on_device, self.rows)[4:7]
            self._penalties = no_penalties(self.rows, self.vocabulary, self.device)._replace(
                repetition_N=repetition_N, presence_N=presence_N, frequency_N=frequency_N
            )
        row, tables = request.row, self._penalties
        tables.counts_NV[row].zero_()
        if request.outputs:  # it was preempted
            outputs = self._sent(request.outputs, torch.int32)
            count(tables, outputs, torch.full_like(outputs, row))
        if tables.prompt_NW is not None:
            tables.prompt_NW[row] = self._sent(_bits(request.prompt, self.vocabulary), torch.int32)


def _drawn_last(request: Request) -> int:
    """Index of the output that the newest step samples, without drafts: the last one in flight."""
    return request.total - len(request.prompt) - 1


def _mask(constraint: Constraint | None) -> np.ndarray | None:
    return None if constraint is None else constraint.mask()


def _mirror(rows: int, pinned: bool) -> Mirror:
    buffer = torch.zeros(ROW_BYTES * rows, dtype=torch.uint8, pin_memory=pinned)
    mirror = Mirror(buffer, *(part.numpy() for part in _parts(buffer, rows)))
    mirror.repetition_N[:] = 1.0
    return mirror


def _parts(buffer: Tensor, rows: int) -> list[Tensor]:
    """Views of the buffer as consecutive fields."""
    floats = [
        buffer[(8 + 4 * i) * rows : (12 + 4 * i) * rows].view(torch.float32) for i in range(6)
    ]
    top_k_N = buffer[(ROW_BYTES - 4) * rows :].view(torch.int32)
    return [buffer[: 8 * rows].view(torch.int64), *floats, top_k_N]


def _parameters(buffer: Tensor, rows: int) -> Parameters:
    seed, temperature, top_p, min_p, *_, top_k = _parts(buffer, rows)
    return Parameters(temperature, top_k, top_p, min_p, seed)


def no_penalties(rows: int, vocabulary: int, device: torch.device) -> Penalties:
    ones = torch.ones(rows, device=device)
    counts = torch.zeros(rows, vocabulary, dtype=torch.int32, device=device)
    prompt = torch.zeros(rows, words(vocabulary), dtype=torch.int32, device=device)
    return Penalties(ones, torch.zeros_like(ones), torch.zeros_like(ones), counts, prompt)


def _bits(tokens: Sequence[int], vocabulary: int) -> np.ndarray:
    """Bit set over the vocabulary in 32-bit words."""
    is_counted = np.zeros(32 * words(vocabulary), dtype=np.uint8)
    is_counted[np.asarray(tokens, dtype=np.int64)] = 1
    return np.packbits(is_counted, bitorder="little").view(np.int32)
