"""Anchors: positions at which another request is likely to branch off.

A layer with a window, or with a state, can only be continued where its last tokens, or a snapshot, are still there.
So the pages that matter are those just before an anchor: a length at which another request is likely to go on.

    system prompt <end> user <end> answer <end> user <end> | answer
                       ^ first turn                       ^ end of the prompt

An end-of-sequence token in a prompt is the border of a turn. The first border is what conversations with the same
system prompt share, the last one and the end of the prompt are where this conversation is asked again. The end of an
answer needs no anchor: what a request holds when it ends stays findable as long as any of its pages. Pure.
"""

from collections.abc import Collection, Sequence


def anchors_of(prompt: Sequence[int], ends: Collection[int], page_size: int) -> list[int]:
    """Anchor positions in whole blocks, ascending: after the first and the last turn, and after the prompt."""
    borders = [at + 1 for at, token in enumerate(prompt) if token in ends] if ends else []
    chosen = {*borders[:1], *borders[-1:], len(prompt)}
    return sorted({tokens // page_size for tokens in chosen} - {0})
