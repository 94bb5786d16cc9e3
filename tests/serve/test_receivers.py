"""One report to many receivers: everybody gets its own, in order, and hears of its end once."""

import asyncio
import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cairn.serve.engine.messages import Begun, Ended, EngineFailed, Tokens
from cairn.serve.engine.receivers import deliver, fail
from cairn.serve.engine.request import Ledger
from cairn.serve.engine.stream import Stream


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


def test_coroutines_of_one_loop_are_woken_by_one_call():
    async def main():
        loop, calls = asyncio.get_running_loop(), Counter()
        streams = [Stream(id, lambda id: None) for id in range(5)]
        reading = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.update(["call"]), call(*args))[1]
        receivers = {stream.id: stream for stream in streams}
        ids = list(range(5))
        report = Tokens(1, ids, ids, {}, {}, [ended(4)])
        thread = threading.Thread(target=deliver, args=(report, receivers))
        thread.start()
        deltas = await asyncio.gather(*reading)
        thread.join()
        return calls, deltas, receivers

    calls, deltas, receivers = asyncio.run(main())
    assert calls == {"call": 1}
    assert [delta.tokens for delta in deltas] == [[id] for id in range(5)]
    assert deltas[4].ended is not None
    assert set(receivers) == {0, 1, 2, 3}
