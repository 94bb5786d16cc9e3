"""Distribution of a step's report to the requests it contains tokens for.

    Tokens: ids, tokens, ended --deliver--> put, wake | end, wake        the engine died --fail--> all

A receiver gets its token and is woken before the next one gets its own: what belongs to one request is looked at
once in a step. Knows neither threads nor processes.
"""

from typing import Protocol

from cairn.core.errors import CairnError
from cairn.serve.engine.messages import Begun, Ended, Scored, Tokens


class Receiver(Protocol):
    """Receiver of a request's output. Called in one thread, the client's unless another was set: returns
    at once, raises nothing."""

    id: int

    def begin(self, begun: Begun | None, prompt: list[Scored] | None, pooled: bytes | None) -> None:
        """Called with the first token, just before it."""
        ...

    def put(self, tokens: list[int], scored: list[Scored] | None, ended: Ended | None) -> None:
        """The next tokens, often one, and if asked for their log-probabilities; `ended`: they are the last ones."""
        ...

    def end(self, ended: Ended) -> None:
        """No further token."""
        ...

    def fail(self, problem: CairnError) -> None:
        """Nothing more comes, because the engine is gone."""
        ...

    def wake(self) -> None:
        """Called after `put`, `end` or `fail` to notify the waiting reader."""
        ...


Receivers = dict[int, Receiver]  # by the number of their request, as long as it is on its way


def deliver(report: Tokens, receivers: Receivers) -> None:
    """Deliver a report; receivers of finished requests are removed."""
    for id in report.begun.keys() | report.prompts.keys() | report.pooled.keys():
        if (receiver := receivers.get(id)) is not None:
            receiver.begin(report.begun.get(id), report.prompts.get(id), report.pooled.get(id))
    scores, ends = report.logprobs, {ended.id: ended for ended in report.ended}
    gone = {id: receivers.pop(id, None) for id in ends}
    for id, tokens in report.runs():
        receiver = receivers.get(id) or gone.get(id)
        if receiver is not None:
            receiver.put(tokens, scores.get(id), ends.pop(id, None))
            receiver.wake()
    for id, ended in ends.items():  # without a token
        if (receiver := gone[id]) is not None:
            receiver.end(ended)
            receiver.wake()


def fail(receivers: Receivers, problem: CairnError) -> None:
    """All of them, each once."""
    for receiver in list(receivers.values()):
        receiver.fail(problem)
        receiver.wake()
