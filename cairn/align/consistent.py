"""No rounding between trainer and engine: the engine that sampled an answer says how likely it is by now.

    engine    batch invariant: a whole sequence at once has the bits of its tokens one by one
              (`serve.engine.batch_invariant`), on a GPU its runner with `Kernels.invariant`
    trainer   takes a rule's loss and slope at the engine's log-probabilities, and gradients through its own passes

Sums of floating-point numbers depend on their order, and the order on the shapes. With one function for both there is
one policy, not two that nearly agree: the ratio is exactly 1 on policy, and changes by what an update has changed. The
price: slower kernels in the engine, and one more forward pass over the answers for each further update that learns from
a round of rollouts. The first update needs none: under the weights that sampled an answer its scores are the numbers
that it was sampled with.
"""

from collections.abc import Sequence

import torch

from cairn.align.policy import Policy
from cairn.core.errors import ConfigError
from cairn.models.spec import ModelSpec
from cairn.train.data.batch import IGNORED, Document

CHECKED = 16  # answers that are scored although their scores are known
NOW = "now"  # the stream of a document: log-probabilities of its targets under the weights that are about to change


def check_covered(spec: ModelSpec, device: str, rank: int) -> None:
    """Refuses what the engine does not compute in the same bits for one token and for many. `rank`: of an adapter."""
    mixers = {spec.mixer_of(layer) for layer in range(spec.layers)} - {"attention"}
    uncovered = [f"layers of {name}" for name in sorted(mixers)]
    uncovered += ["experts"] if spec.experts is not None else []
    ropes = [rope for rope in (spec.rope, spec.rope_local) if rope is not None]
    uncovered += ["dynamic rotations"] if any(rope.kind == "dynamic" for rope in ropes) else []
    uncovered += ["an adapter on a GPU"] if rank and device != "cpu" else []
    if uncovered:
        raise ConfigError(
            f"rollout.consistent for a model with {' and '.join(uncovered)}: it covers plain attention, dense layers "
            "and rotations that do not depend on the length, and adapters on a CPU",
            hint="leave it out: the mismatch is printed every round",
        )


def scored(policy: Policy, documents: Sequence[Document], fresh: bool = False) -> list[Document]:
    """Add the engine's log probability of each target under the weights of `Policy.updated`.

    `fresh`: these weights sampled the documents. A few are scored all the same; should one differ, all are scored, and
    the mismatch that is measured says so.
    """
    if fresh:
        few = documents[:: -(-len(documents) // CHECKED)]
        if all(torch.equal(one.extra[NOW], one.extra["old"]) for one in _scored(policy, few)):
            return [_with_scores(document, document.extra["old"]) for document in documents]
    return _scored(policy, documents)


def _scored(policy: Policy, documents: Sequence[Document]) -> list[Document]:
    learnt = [document.targets_T != IGNORED for document in documents]
    places = [int(learnt_T.int().argmax()) for learnt_T in learnt]  # before them all may be cached
    texts = [document.tokens_T.tolist() for document in documents]
    scores_of_texts = policy.scores(texts, [1 + place for place in places])
    scored_documents = []
    for document, learnt_T, place, scores in zip(
        documents, learnt, places, scores_of_texts, strict=True
    ):
        now_T = torch.zeros(len(document.tokens_T))
        now_T[place:-1] = torch.tensor(scores)
        scored_documents.append(_with_scores(document, now_T.where(learnt_T, 0.0)))
    return scored_documents


def _with_scores(document: Document, now_T: torch.Tensor) -> Document:
    return document._replace(extra={**document.extra, NOW: now_T})
