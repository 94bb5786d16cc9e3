"""The text of each running request with an index over it, kept as far as its tokens are known. Pure Python."""

from typing import TYPE_CHECKING

from cairn.serve.engine.speculate.occurrences import LONGEST, Occurrences

if TYPE_CHECKING:
    from cairn.serve.engine.request import Request
    from cairn.serve.engine.speculate.drafter import Ask

MOST_PROMPT = 32768  # tokens of a prompt that are searched: the last ones


class OwnText:
    def __init__(self, request: "Request") -> None:
        self.tokens = request.prompt[-MOST_PROMPT:]
        self.outputs = 0  # so many of the request's outputs are in `tokens`
        self.index = Occurrences()
        self.index.index(self.tokens, 0)

    def follow(self, request: "Request") -> None:
        """Take in the outputs that have come since."""
        start = len(self.tokens)
        self.tokens += request.outputs[self.outputs :]
        self.outputs = len(request.outputs)
        self.index.index(self.tokens, start)


class OwnTexts:
    def __init__(self) -> None:
        self._texts: dict[Request, OwnText] = {}

    def of(self, request: "Request") -> OwnText:
        found = self._texts.get(request)
        if found is None:
            found = self._texts[request] = OwnText(request)
        found.follow(request)
        return found

    def pop(self, request: "Request") -> OwnText | None:
        return self._texts.pop(request, None)

    def __len__(self) -> int:
        return len(self._texts)


def tail_of(own: OwnText, ask: "Ask") -> list[int]:
    """The last tokens, those in flight as they are hoped for."""
    return [*own.tokens[-LONGEST:], *ask.hoped][-LONGEST:]
