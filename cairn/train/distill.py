"""Learning from a teacher's whole distribution, not from one right token: a loss, and the streams that it reads.

    teacher -> the k most likely next tokens of each token and their log-probabilities -> Batch.extra
    loss = weight * T^2 * KL(teacher || student)  +  (1 - weight) * cross entropy

The divergence is that of k + 1 outcomes: each of the k tokens, and everything else together. It is never more than that
of the whole vocabulary, and 0 where the student agrees (arXiv:1503.02531).
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import open_checkpoint
from cairn.models.hub import resolve
from cairn.models.linear.maps import Vocabulary
from cairn.models.spec import ModelSpec
from cairn.models.tokenizer import Tokenizer
from cairn.models.transformer import Transformer
from cairn.train.config import Distill, Train
from cairn.train.data.batch import IGNORED, Batch
from cairn.train.data.tokenizer_identity import check_same, tokenizer_hash
from cairn.train.next_batches import NextBatches
from cairn.train.objective import CHUNK, summed_in_chunks, token_losses
from cairn.train.parallel.vocabulary import scores_of

if TYPE_CHECKING:
    from cairn.train.state import TrainState

IDS, LOGP = "teacher_ids", "teacher_logp"  # streams [T, k]
SMALLEST = 1e-6  # of what the k tokens leave to all others


class Distillation:
    """The `Loss` of a training step that learns from a teacher. Reads the streams of `Teacher`."""

    def __init__(
        self, spec: ModelSpec, settings: Distill, z_loss: float = 0.0, chunk: int = CHUNK
    ) -> None:
        self.softcap, self.settings = spec.logit_softcap, settings
        self.z_loss, self.chunk = z_loss, chunk

    def __call__(
        self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: Batch, valid: Tensor
    ) -> Tensor:

        def arguments(part: slice) -> tuple[Any, ...]:
            streams = batch.extra[IDS][part], batch.extra[LOGP][part]
            return batch.targets_T[part], *streams

        return summed_in_chunks(self._sum, arguments, hidden_TD, vocabulary, self.chunk) / valid

    def _sum(
        self,
        hidden_CD: Tensor,
        vocabulary: Vocabulary,
        targets_C: Tensor,
        ids_CK: Tensor,
        logp_CK: Tensor,
    ) -> Tensor:
        scores_CV = scores_of(hidden_CD, vocabulary, self.softcap)
        weight, hot = self.settings.weight, self.settings.temperature
        logq_CK = (scores_CV / hot).log_softmax(-1).gather(1, ids_CK)
        kl_C = top_divergence(logp_CK, logq_CK).where(targets_C != IGNORED, 0.0)
        right_C = token_losses(scores_CV, targets_C, 0.0, self.z_loss)
        return (weight * hot**2 * kl_C + (1 - weight) * right_C).sum()


def top_divergence(logp_CK: Tensor, logq_CK: Tensor) -> Tensor:
    """KL of k + 1 outcomes, nats: the k tokens, and all others as one."""
    inside_C = (logp_CK.exp() * (logp_CK - logq_CK)).sum(-1)
    rest_p_C = (1 - logp_CK.exp().sum(-1)).clamp(SMALLEST, 1.0)
    rest_q_C = (1 - logq_CK.exp().sum(-1)).clamp(SMALLEST, 1.0)
    return inside_C + rest_p_C * (rest_p_C.log() - rest_q_C.log())


class Teacher:
    """A model that says what it expects; its weights never change."""

    def __init__(self, model: Transformer, settings: Distill) -> None:
        self.model = model.eval().requires_grad_(False)
        self.top = min(settings.top, model.spec.vocab)
        self.temperature = settings.temperature

    @torch.no_grad()
    def streams(self, batch: Batch) -> dict[str, Tensor]:
        """The most likely next tokens of each token, and their log-probabilities at the temperature."""
        attend = PackedDocuments(batch.lengths, batch.tokens_T.device)
        hidden_TD = self.model(batch.tokens_T, batch.positions_T, attend)
        parts = [self._best(part_CD) for part_CD in hidden_TD.split(CHUNK)]
        return {IDS: torch.cat([ids for ids, _ in parts]), LOGP: torch.cat([p for _, p in parts])}

    def _best(self, hidden_CD: Tensor) -> tuple[Tensor, Tensor]:
        logp_CV = F.log_softmax(self.model.logits(hidden_CD).float() / self.temperature, -1)
        best = logp_CV.topk(self.top, dim=-1)
        return best.indices, best.values


class TaughtBatches:
    """Batches of a source, each with what the teacher says about its tokens."""

    def __init__(self, batches: NextBatches, teacher: Teacher, name: str) -> None:
        self.batches, self.teacher = batches, teacher
        self.fingerprint = f"{batches.fingerprint} taught by {name}"
        self.may_be_empty = batches.may_be_empty

    def next_batches(self, state: "TrainState") -> list[Batch]:
        batches = self.batches.next_batches(state)
        return [
            batch._replace(extra=batch.extra | self.teacher.streams(batch)) for batch in batches
        ]

    def close(self) -> None:
        self.batches.close()


def check_distill(config: Train) -> None:
    """Refuses a layout in which no rank has the scores of all tokens."""
    if config.distill.teacher and config.parallel.tp > 1:
        raise ConfigError(
            f"distillation with tp {config.parallel.tp}: no rank has the scores of all tokens",
            hint="use fsdp, dp, pp or cp",
        )


def open_teacher(
    settings: Distill, spec: ModelSpec, tokenizer: Tokenizer | None, device: str
) -> Teacher:
    """The teacher of a run; refuses one that speaks other tokens than the student."""
    opened = open_checkpoint(resolve(settings.teacher))
    if opened.spec.vocab != spec.vocab:
        raise ConfigError(
            f"the teacher {settings.teacher} has {opened.spec.vocab} tokens, the student {spec.vocab}",
            hint="teacher and student need one tokenizer: --data.tokenizer, --model.vocab",
        )
    if tokenizer is not None:
        check_same(tokenizer_hash(opened.tokenizer()), tokenizer, f"the teacher {settings.teacher}")
    return Teacher(opened.load(device, _computed_in(opened.stored_dtype(), device)), settings)


def _computed_in(stored: torch.dtype, device: str) -> torch.dtype:
    """Dtype in which the device computes efficiently."""
    if torch.device(device).type == "cpu":
        return torch.float32
    return torch.bfloat16 if stored == torch.float32 else stored
