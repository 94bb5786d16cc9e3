"""Log likelihood of tokens: the model runs over whole sequences, without a cache.

    spans, longest first -> passes of several packed sequences -> log-probabilities -> in the order they came in

Two forms that agree: one span in each pass (`batch_tokens` 0), whose result cannot depend on anything but the span,
and several spans side by side, which keeps a GPU busy. Packed sequences do not see each other, so what differs between
the two is only how a matrix product rounds.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cairn.eval.requests import Likelihood, ProgressCallback, silent
from cairn.eval.token_windows import ScoredSpan
from cairn.models.attend import PackedDocuments
from cairn.models.transformer import Transformer

ROWS = 1024  # tokens whose logits exist at a time


class Scorer:
    def __init__(self, model: Transformer, batch_tokens: int = 0) -> None:
        """`batch_tokens`: about how many tokens a pass has; 0: one span in each."""
        self.model, self.batch_tokens = model, batch_tokens
        self.device = model.embedding.weight.device

    def score(
        self, spans: Sequence[ScoredSpan], advance: ProgressCallback = silent
    ) -> list[Likelihood]:
        """Score spans; results are in the order of `spans`. `advance` is called with the number of completed spans."""
        found: list[Likelihood | None] = [None] * len(spans)
        for part in passes(spans, self.batch_tokens):
            for place, result in zip(part, self._one_pass([spans[i] for i in part]), strict=True):
                found[place] = result
            advance(len(part))
        return [result for result in found if result is not None]

    @torch.inference_mode()
    def _one_pass(self, spans: Sequence[ScoredSpan]) -> list[Likelihood]:
        lengths = [len(span.tokens) - 1 for span in spans]
        attend = PackedDocuments(lengths, self.device)
        inputs_T = self._tensor([token for span in spans for token in span.tokens[:-1]])
        hidden_TD = self.model(inputs_T, attend.positions_T(), attend)
        ends = torch.tensor(lengths).cumsum(0).tolist()
        rows = [
            row
            for end, span in zip(ends, spans, strict=True)
            for row in range(end - span.scored, end)
        ]
        targets_R = self._tensor(
            [token for span in spans for token in span.tokens[len(span.tokens) - span.scored :]]
        )
        logprobs_R, greedy_R = self._targets(hidden_TD[self._tensor(rows)], targets_R)
        scored = [span.scored for span in spans]
        parts = zip(logprobs_R.split(scored), greedy_R.split(scored), scored, strict=True)
        return [
            Likelihood(logprobs.sum().item(), count, bool(greedy.all()))
            for logprobs, greedy, count in parts
        ]

    def _targets(self, hidden_RD: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each target in float64, and whether it was the most likely token."""
        logprobs, greedy = [], []
        for part_RD, target_R in zip(hidden_RD.split(ROWS), targets_R.split(ROWS), strict=True):
            logits_RV = self.model.logits(part_RD).float()
            chosen_R = logits_RV.gather(-1, target_R[:, None])[:, 0]
            logprobs.append((chosen_R - logits_RV.logsumexp(-1)).double().cpu())
            greedy.append((logits_RV.argmax(-1) == target_R).cpu())
        return torch.cat(logprobs), torch.cat(greedy)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def passes(spans: Sequence[ScoredSpan], batch_tokens: int) -> Iterator[list[int]]:
    """Batches of spans, the longest first, so that running out of memory is detected immediately."""
    order = sorted(range(len(spans)), key=lambda i: (-len(spans[i].tokens), i))
    part: list[int] = []
    tokens = 0
    for place in order:
        size = len(spans[place].tokens) - 1
        if part and tokens + size > batch_tokens:
            yield part
            part, tokens = [], 0
        part.append(place)
        tokens += size
    if part:
        yield part
