"""One report to many receivers: everybody gets its own, in order, and hears of its end once."""

from hypothesis import given
from hypothesis import strategies as st

from cairn.serve.engine.messages import Begun, Ended, EngineFailed, Scored, Tokens
from cairn.serve.engine.receivers import deliver, fail
from cairn.serve.engine.request import Ledger


class Heard:
    """Writes down what it is told."""

    def __init__(self, id):
        self.id, self.tokens, self.ends, self.begun, self.woken, self.pending = id, [], [], 0, 0, 0

    def begin(self, begun, prompt, pooled):
        assert not self.tokens
        self.begun += 1

    def put(self, tokens, scored, ended):
        assert not self.ends
        self.tokens += tokens
        self.ends += [ended] if ended else []
        self.pending += 1

    def end(self, ended):
        self.ends.append(ended)
        self.pending += 1

    def fail(self, problem):
        self.ends.append(problem)
        self.pending += 1

    def wake(self):
        self.woken, self.pending = self.woken + 1, 0


def ended(id, finish="length"):
    return Ended(id, finish, None, None, 0, Ledger())


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    known=st.sets(st.integers(0, 7)),
    stop=st.integers(0, 6),
)
def test_everybody_gets_its_own_and_one_end(lengths, known, stop):
    """A request of length 0 ends without a token; some are unknown; after `stop` steps the engine is gone."""
    heard = {id: Heard(id) for id in known if id < len(lengths)}
    receivers = dict(heard)
    for step in range(stop):
        ids = [id for id, length in enumerate(lengths) if step < length]
        over = [id for id, length in enumerate(lengths) if step == max(length - 1, 0)]
        begun = {id: Begun(0, Ledger()) for id in ids if step == 0 and lengths[id] > 1}
        tokens = [10 * id + step for id in ids]
        deliver(Tokens(step, ids, tokens, {}, {}, [ended(id) for id in over], begun), receivers)
    problem = EngineFailed("gone")
    fail(receivers, problem)
    for id, each in heard.items():
        done = stop >= max(lengths[id], 1)
        assert each.tokens == [10 * id + step for step in range(min(lengths[id], stop))]
        assert len(each.ends) == 1
        assert (each.ends[0] is problem) is not done
        assert (id in receivers) is not done
        assert each.pending == 0
        assert each.begun == (lengths[id] > 1 and stop > 0)


def test_several_tokens_of_a_step_arrive_together_with_their_scores():
    heard = {id: Heard(id) for id in (3, 4)}
    scored = [Scored(-0.5, []), Scored(-0.25, [])]
    report = Tokens(1, [3, 4], [7, 8, 9], {3: scored}, {}, [ended(3)], counts=[2, 1])
    deliver(report, dict(heard))
    assert (heard[3].tokens, heard[4].tokens) == ([7, 8], [9])
    assert (heard[3].woken, len(heard[3].ends), heard[4].ends) == (1, 1, [])
