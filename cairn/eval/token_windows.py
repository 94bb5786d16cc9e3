"""Windows of tokens: the input of the model and the part that is scored. Pure Python.

rolling_windows(4 tokens at once)             every token is scored once; windows share one token
  P a b c | d e f g | h            reads      P is the prefix token: begin of text, or end of text
    a b c   d e f g   h            scores

strided_windows(window 4, stride 2)           each window has up to window - stride tokens of context
  a b c d           reads abcd, scores  bcd
      c d e f       reads cdef, scores   ef
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Encode = Callable[[str], list[int]]


class ScoredSpan(NamedTuple):
    """Tokens of which the last `scored` are scored, each after those before it."""

    tokens: list[int]
    scored: int


def continuation_span(
    context: str, continuation: str, encode: Encode, encode_plain: Encode, prefix: int, longest: int
) -> ScoredSpan:
    """A continuation after its context, cut at the left to the `longest` tokens that a model can read.

    Spaces at the end of the context belong to the continuation: tokens begin with their space. `encode` adds the
    special tokens that the model expects, `encode_plain` none; `prefix` stands in for a context without tokens.
    """
    if context:
        stripped = context.rstrip()
        before = encode(stripped)
        after = encode(context + continuation)[len(before) :]
        if not after:  # one token of both: nothing to score would count as certain
            after = encode_plain(context[len(stripped) :] + continuation)
    else:
        after = encode_plain(continuation)
        before = [prefix]
        if after[:1] == before:
            after = after[1:]
    before = before or [prefix]
    tokens = [*before, *after][-(longest + 1) :]
    return ScoredSpan(tokens, min(len(after), len(tokens) - 1))


def rolling_windows(tokens: Sequence[int], prefix: int, window: int) -> list[ScoredSpan]:
    """lm-eval's windows: disjoint in what they score, with as much context as fits behind the first one."""
    tokens = tokens[1:] if tokens[:1] == [prefix] else tokens  # a tokenizer may have put it there
    if not tokens:
        return []
    first = min(window, len(tokens))
    spans = [ScoredSpan([prefix, *tokens[:first]], first)]
    done = first
    while done < len(tokens):
        scored = min(len(tokens) - done, window)
        end = done + scored
        spans.append(ScoredSpan(list(tokens[end - window - 1 : end]), scored))
        done = end
    return spans


def strided_windows(tokens: Sequence[int], window: int, stride: int) -> list[ScoredSpan]:
    """The sliding windows of transformers' guide to perplexity; the first token of the text is not scored."""
    spans, scored_to = [], 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        part = list(tokens[begin:end])
        scored = min(end - scored_to, len(part) - 1)
        if scored > 0:
            spans.append(ScoredSpan(part, scored))
        scored_to = end
        if end == len(tokens):
            break
    return spans
