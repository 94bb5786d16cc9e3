"""A drafter that knows the answers and tells them with a given accuracy: the rest of its guesses is wrong."""

import random
from collections.abc import Mapping, Sequence

from cairn.serve.engine.request import Request
from cairn.serve.engine.speculate.drafter import Ask


class NoisyDrafter:
    """`answers`: by the request's id or the request itself. The same question gets the same guesses, as on any rank."""

    def __init__(
        self, answers: Mapping, accuracy: float, vocabulary: int, *, whole: bool = False
    ) -> None:
        self.answers, self.accuracy, self.vocabulary = answers, accuracy, vocabulary
        self.whole = whole  # always as many as asked for
        self.asked = 0

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._propose(*ask) for ask in asks]

    def finish(self, request: Request) -> None:
        """It is told nothing that it does not know."""

    def _propose(self, request: Request, hoped: Sequence[int], most: int) -> list[int]:
        self.asked += 1
        answer = self.answers.get(request.id) or self.answers[request]
        at = len(request.outputs) + len(hoped)
        chance = random.Random(f"{request.arrival} {at} {most}")
        count = most if self.whole else chance.randint(0, most)
        right = answer[at : at + count]
        guesses = [
            t if chance.random() < self.accuracy else (t + 1) % self.vocabulary for t in right
        ]
        # Behind its end nobody knows better; guesses there must do no harm.
        return guesses + [chance.randrange(self.vocabulary) for _ in range(count - len(guesses))]
