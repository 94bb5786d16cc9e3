"""Answers to one prompt as documents behind one copy of it: the prompt is computed once for its group. Pure.

    prompt a b <end>        prom        the prompt but for its last token, which no answer is learnt from
    prompt c <end>          pt a b <end>     the last token predicts another one in each answer, so each has its own
                            pt c <end>

What is learnt is the same: the tokens, what they see and their positions do not change, and a prompt has no loss.
"""

from collections.abc import Sequence

import torch

from cairn.train.data.batch import IGNORED, NONE, Document


def share_prompts(documents: Sequence[Document]) -> tuple[list[Document], list[int]]:
    """The same documents, neighbours with one beginning behind a copy of it, and which is behind which."""
    shared: list[Document] = []
    prefixes: list[int] = []
    at = 0
    while at < len(documents):
        prompt = _prompt(documents[at])
        group = 1
        while at + group < len(documents) and prompt == _prompt(documents[at + group]):
            group += 1
        if group == 1 or not prompt:
            shared.append(documents[at])
            prefixes.append(NONE)
            at += 1
            continue
        first = len(shared)
        shared.append(_part(documents[at], slice(0, len(prompt))))
        shared += [_part(one, slice(len(prompt), None)) for one in documents[at : at + group]]
        prefixes += [NONE, *[first] * group]
        at += group
    return shared, prefixes


def _prompt(document: Document) -> list[int]:
    """The tokens before the first one that something is learnt from."""
    learnt = torch.nonzero(document.targets_T != IGNORED)
    return document.tokens_T[: int(learnt[0])].tolist() if len(learnt) else []


def _part(document: Document, part: slice) -> Document:
    extra = {name: stream[part] for name, stream in document.extra.items()}
    return Document(document.tokens_T[part], document.targets_T[part], extra)
