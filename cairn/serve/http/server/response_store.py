"""The last responses of /v1/responses, for clients that go on from one or read it again (`--store-responses`).

Kept in memory, each for the API key that it was made with; the oldest is forgotten first.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

from cairn.serve.http.protocol.responses import ModelResponse


class Stored(NamedTuple):
    response: ModelResponse
    inputs: list[dict[str, Any]]  # what it was asked with, the conversation before it included
    items: list[dict[str, Any]]  # the conversation so far, as a request would send it


class ResponseStore:
    def __init__(self, most: int) -> None:
        self.most = most  # 0: nothing is kept
        self._kept: OrderedDict[tuple[str, str], Stored] = OrderedDict()

    def put(self, holder: str, stored: Stored) -> None:
        self._kept[holder, stored.response.id] = stored
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)

    def get(self, holder: str, id: str) -> Stored | None:
        return self._kept.get((holder, id))

    def drop(self, holder: str, id: str) -> bool:
        return self._kept.pop((holder, id), None) is not None
