"""Which tokens are read and which are scored, held against the definitions of lm-eval and of transformers' guide."""

from hypothesis import given
from hypothesis.strategies import integers

from cairn.eval.token_windows import ScoredSpan, continuation_span, rolling_windows, strided_windows


def words(text):
    """A tokenizer for tests: a token per word with the spaces before it, and 0 at the beginning of a text."""
    import re

    return [0, *(sum(map(ord, word)) for word in re.findall(r"\s*\S+|\s+$", text))]


def plain(text):
    return words(text)[1:]


@given(integers(1, 60), integers(1, 20))
def test_rolling_windows_score_each_token_once_and_with_the_most_context_that_fits(count, window):
    tokens = list(range(1, count + 1))
    spans = rolling_windows(tokens, 0, window)
    scored = [token for span in spans for token in span.tokens[len(span.tokens) - span.scored :]]
    assert scored == tokens
    assert all(len(span.tokens) - 1 <= window for span in spans)
    # Only the first window has less context than the window allows, and it begins with the prefix.
    assert spans[0].tokens[0] == 0
    assert all(len(span.tokens) - 1 == window for span in spans[1:])


@given(integers(1, 60), integers(2, 20), integers(1, 20))
def test_strided_windows_are_those_of_the_loop_in_the_guide(count, window, stride):
    stride = min(stride, window)
    tokens = list(range(count))
    expected, before = [], 0
    for begin in range(0, count, stride):  # huggingface.co/docs/transformers/perplexity
        end = min(begin + window, count)
        targets = end - before
        inputs = tokens[begin:end]
        labels = [None] * (len(inputs) - targets) + inputs[len(inputs) - targets :]
        scored = sum(label is not None for label in labels[1:])
        if scored > 0:
            expected.append(ScoredSpan(inputs, scored))
        before = end
        if end == count:
            break
    assert strided_windows(tokens, window, stride) == expected


def test_no_tokens_have_no_windows():
    assert rolling_windows([], 0, 4) == strided_windows([], 4, 2) == []


def test_a_prefix_that_the_tokenizer_has_put_there_is_not_put_there_again():
    assert rolling_windows([0, 5, 6, 7], 0, 2) == rolling_windows([5, 6, 7], 0, 2)
    assert rolling_windows([0], 0, 2) == []


def test_a_context_of_spaces_alone_is_the_prefix_token():
    assert continuation_span(" ", "a b", plain, plain, 7, 99) == ScoredSpan([7, *plain(" a b")], 2)


def test_spaces_before_a_continuation_belong_to_it():
    spans = [
        continuation_span(context, continuation, words, plain, 7, 99)
        for context, continuation in (("a b", " c d"), ("a b ", "c d"))
    ]
    assert spans[0] == spans[1] == ScoredSpan(words("a b c d"), 2)


def test_an_empty_context_is_the_prefix_token_and_long_ones_are_cut_at_the_left():
    assert continuation_span("", "c d", words, plain, 7, 99) == ScoredSpan([7, *plain("c d")], 2)
    first = plain("c")[0]
    assert continuation_span("", "c d", words, plain, first, 99) == ScoredSpan(plain("c d"), 1)
    assert continuation_span("a b c", " d", words, plain, 7, 2) == ScoredSpan(
        plain("a b c d")[1:], 1
    )
    assert continuation_span("a", " b c d", words, plain, 7, 2).scored == 2


def test_a_continuation_that_merges_with_its_context_is_scored_by_itself():
    """A tokenizer may have one token for both, and a score over no tokens would be that of certainty."""
    whole = {"th": [5], "the": [9], "e": [2]}
    assert continuation_span("th", "e", whole.get, whole.get, 7, 99) == ScoredSpan([5, 2], 1)
