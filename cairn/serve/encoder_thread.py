"""Thread that owns a text encoder: batches of texts in, pooled vectors out.

    queue --batch by tokens--> packed tokens -> model -> pooled vectors -> jobs end

On a GPU the next batch is launched before the vectors of the last one are read, so that the device does not wait for
the host.
"""

import time
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cairn.models.encoder.attend import Bidirectional
from cairn.models.encoder.pool import pooled
from cairn.models.encoder.pooling_rules import Pooling
from cairn.serve.encoder_batch import by_length, warm_batches
from cairn.serve.engine.request import Request
from cairn.serve.engine.step_times import Spent
from cairn.serve.job_thread import JobThread, WaitingJob


class Launched(NamedTuple):
    """A batch on its way through the device."""

    texts: list[WaitingJob]
    vectors_BD: Tensor
    began: float
    launched: float


class EncoderThread(JobThread):
    what = "text encoder"

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        budget_tokens: int,
        rows: int,
        plain: bool,
        context: int,
    ) -> None:
        super().__init__(device)
        self.model, self.plain = model, plain
        self.budget_tokens, self.rows = budget_tokens, rows
        self._in_flight: deque[Launched] = deque()
        self._ahead = 2 if device.type == "cuda" else 1
        if device.type == "cuda":
            self.warm(context)
        self.start()

    @torch.inference_mode()
    def warm(self, context: int) -> None:
        """Compute a few tokens and many, so that the kernels of both are compiled before a request waits for them."""
        for lengths in warm_batches(self.budget_tokens, context):
            attend = Bidirectional(lengths, self.device, self.plain)
            tokens_T = torch.zeros(sum(lengths), dtype=torch.int64, device=self.device)
            self.model(tokens_T, attend.positions_T(), attend, None)

    def _step(self) -> None:
        """Launch what fits, then read the oldest batch."""
        while len(self._in_flight) < self._ahead:
            batch = self._take(self.budget_tokens, self.rows)
            if not batch:
                break
            self._launch(by_length(batch))
        if self._in_flight:
            self._read(self._in_flight.popleft())

    def _launch(self, texts: list[WaitingJob]) -> None:
        began = time.monotonic()
        try:
            vectors_BD = self._vectors(texts)
        except Exception as problem:  # noqa: BLE001  reported to the caller, and logged
            self._fail(texts, problem)
            return
        self._in_flight.append(Launched(texts, vectors_BD, began, time.monotonic()))

    def _vectors(self, texts: list[WaitingJob]) -> Tensor:
        requests = [text.job.request for text in texts]
        attend = Bidirectional([text.tokens for text in texts], self.device, self.plain)
        flat = [token for request in requests for token in request.prompt]
        tokens_T = torch.tensor(flat).to(self.device, non_blocking=True)
        hidden_TD = self.model(tokens_T, attend.positions_T(), attend, self._types(requests))
        rules: list[Pooling] = [request.params.pooling or "mean" for request in requests]
        return pooled(hidden_TD, attend.lengths, rules)

    def _types(self, requests: list[Request]) -> Tensor | None:
        """1 for the second text of a pair; None: there are no pairs."""
        if not any(request.segment for request in requests):
            return None
        each = []
        for request in requests:
            types_S = torch.zeros(len(request.prompt), dtype=torch.int64)
            if request.segment:
                types_S[request.segment :] = 1
            each.append(types_S)
        return torch.cat(each).to(self.device, non_blocking=True)

    def _read(self, launched: Launched) -> None:
        vectors_BD = launched.vectors_BD.cpu().numpy()
        now = time.monotonic()
        spent = self._spent_on(launched, now)
        self._count(len(launched.texts), spent, now)
        for text, vector_D in zip(launched.texts, vectors_BD, strict=True):
            job = text.job
            job.pooled = vector_D.tobytes()
            ledger = job.request.ledger
            ledger.first_token = ledger.finished = now
            ledger.prefill_chunks, ledger.prefill = 1, spent
            self._finish_job(job, "stop")

    def _spent_on(self, launched: Launched, now: float) -> Spent:
        tokens = sum(text.tokens for text in launched.texts)
        pairs = sum(text.tokens**2 for text in launched.texts)
        host_s, device_s = launched.launched - launched.began, now - launched.launched
        if self.device.type != "cuda":  # a CPU computes while it launches
            host_s, device_s = device_s, host_s
        return Spent(1, tokens, tokens, 0, tokens, pairs, host_s, device_s)
