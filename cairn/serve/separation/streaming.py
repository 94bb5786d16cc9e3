"""Pages on offer while the rest of their prompt is computed: chunk by chunk, as the steps of the engine land.

    step lands    chunk 1 ---- chunk 2 ---- chunk 3 ---- first token
    reader        Begun, reads 1 .. reads 2 .. reads 3 .. goes on          what is left behind the end is one chunk

Chunks and not layers, because a step of the engine computes all layers of its chunks, on a GPU in one graph, and the
host learns of its end alone. So a prompt that fits into one step is handed over whole, and so is one of a model with
windows, whose pages are given back while it is computed. Knows neither leases nor who holds the pages.
"""

from collections.abc import Container, Iterator, Sequence

from cairn.comm.transfer.handover_messages import Offer
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Request
from cairn.serve.separation.memory import KVMemory
from cairn.serve.separation.sender_thread import SenderThread


class Stream:
    """A prompt that is offered while it is being computed."""

    def __init__(self, offer: Offer, pages: Sequence[int]) -> None:
        self.offer, self.pages = offer, pages
        self.tokens = 0  # that are ready
        self.live = True  # False: its reader has gone, or its pages have been withdrawn


class Streams:
    def __init__(self, engine: Engine, memory: KVMemory, sender: SenderThread) -> None:
        self._engine, self._memory, self._sender = engine, memory, sender
        self._page_size = engine.scheduler.limits.page_size
        self._possible = len(engine.scheduler.blocks.groups) == 1
        self._before: dict[Request, int] = {}  # tokens that were scheduled before this step
        self._streams: dict[str, Stream] = {}  # by request

    def before_step(self) -> None:
        """When the next step of the engine has been taken, what was scheduled by now has landed."""
        if self._engine.overlap and self._possible:
            running = self._engine.scheduler.queues.running
            self._before = {request: request.computed for request in running}

    def computed(self, ids: Container[str]) -> Iterator[tuple[Request, int]]:
        """Requests whose prompts are not computed to the end, and tokens in full pages that are."""
        for request in self._engine.scheduler.queues.running if self._possible else ():
            landed = request.computed
            if self._engine.overlap:
                landed = min(landed, self._before.get(request, 0))
            tokens = landed // self._page_size * self._page_size
            loading = request.loading is not None  # its pages may change until a tier brought them
            if str(request.id) in ids and not loading and 0 < tokens < len(request.prompt):
                yield request, tokens

    def of(self, request: Request) -> Stream | None:
        """Its stream, also one that has ended: a request has one at most."""
        return self._streams.get(str(request.id))

    def begin(self, request: Request, offer: Offer, pages: Sequence[int]) -> Stream:
        stream = self._streams[str(request.id)] = Stream(offer, pages)
        return stream

    def publish(self, stream: Stream, request: Request, tokens: int) -> bool:
        """These tokens can be read. False: the request has other pages now, and these must not be used."""
        if stream.live and request.blocks[: len(stream.pages)] != stream.pages:
            stream.live = False
            return False
        if stream.live:
            self._publish(stream, tokens)
        return True

    def complete(self, id: str, pages: Sequence[int]) -> Offer | None:
        """The prompt is computed, in these pages; the offer that its reader follows, if there is one."""
        stream = self._streams.pop(id, None)
        if stream is None or not stream.live or list(stream.pages) != list(pages):
            return None
        self._publish(stream, stream.offer.tokens)
        return stream.offer

    def freed(self, id: str, name: str) -> None:
        """This offer is not read any more."""
        stream = self._streams.get(id)
        if stream is not None and stream.offer.request == name:
            stream.live = False

    def end(self, id: str) -> None:
        self._streams.pop(id, None)

    def _publish(self, stream: Stream, tokens: int) -> None:
        if tokens <= stream.tokens:
            return
        some = slice(stream.tokens // self._page_size, -(-tokens // self._page_size))
        self._memory.copy_out(stream.pages[some], stream.offer.table[some])
        self._sender.ready(stream.offer.request, tokens)
        stream.tokens = tokens
