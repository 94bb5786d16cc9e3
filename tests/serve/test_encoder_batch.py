"""The batcher of texts: nothing is lost, nobody is passed by an equal, and batches keep to their budget."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from cairn.serve.encoder_batch import MANY_TOKENS, TextQueue, by_length, warm_batches


class Waiting(NamedTuple):
    number: int
    tokens: int
    priority: int


lines = st.lists(st.tuples(st.integers(1, 50), st.integers(-1, 1)), max_size=40)


@given(lines, st.integers(1, 60), st.integers(1, 9))
def test_every_text_comes_once_in_order_and_within_the_budget(given_texts, budget, most):
    queue = TextQueue()
    texts = [Waiting(at, *one) for at, one in enumerate(given_texts)]
    for text in texts:
        queue.add(text)
    taken = []
    while len(queue):
        batch = queue.take(budget, most)
        assert 1 <= len(batch) <= most
        assert len(batch) == 1 or sum(text.tokens for text in batch) <= budget
        taken += batch
    assert taken == sorted(texts, key=lambda text: (text.priority, text.number))
    assert queue.take(budget, most) == []


@given(lines)
def test_what_is_removed_never_comes(given_texts):
    queue = TextQueue()
    texts = [Waiting(at, *one) for at, one in enumerate(given_texts)]
    for text in texts:
        queue.add(text)
    for text in texts[::2]:
        queue.remove(text)
    assert len(queue) == len(texts) - len(texts[::2])
    taken = []
    while len(queue):
        taken += queue.take(64, 8)
    assert sorted(taken) == sorted(texts[1::2])
    assert [text.tokens for text in by_length(taken)] == sorted(text.tokens for text in taken)


@given(st.integers(2, 100_000), st.integers(2, 8192))
def test_warming_keeps_to_the_budget_and_has_many_tokens_where_that_allows_them(budget, context):
    few, many = warm_batches(budget, context)
    assert len(few) == 2 <= len(many)
    assert sum(few) <= budget
    assert sum(many) <= budget
    assert max(few + many) <= context
    assert sum(many) >= min(MANY_TOKENS, budget - max(many)) - max(many)
