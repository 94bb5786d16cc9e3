"""Messages between the engine process and its client.

    client --Submit, Abort, Stop-->  worker        any number at any moment, read between two steps
    client <--Tokens, Beat, ...----  worker        one Tokens for each step that brought something

Arrays in MessagePack: a decode step of 256 requests is two lists of 256 numbers. Requests are known by numbers that
the client gives and never uses twice. Needs no torch, so neither does the client. Knows nothing about sockets.
"""

import os
from collections.abc import Iterator
from typing import Any

import msgspec

from cairn.core.errors import CairnError
from cairn.models.vision.picture import Picture
from cairn.serve.config import EngineConfig, RoleConfig
from cairn.serve.engine.page_map import PageMap
from cairn.serve.engine.pieces import Piece
from cairn.serve.engine.request import Finish, Ledger, Limits
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.step_times import StepTimes
from cairn.serve.engine.weight_sources import WeightsFrom
from cairn.serve.structured_output import Guide


class EngineFailed(CairnError):
    """The engine's process ended, hung or never came up; `details` has its traceback or its stacks."""

    exit_status = 1

    def __init__(self, message: str, hint: str | None = None, details: str = "") -> None:
        super().__init__(message, hint)
        self.details = details

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.message, self.hint, self.details)


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker has to know; it reads this from its standard input."""

    config: EngineConfig
    folder: str  # sockets, the ranks' meeting place and stacks; private to one group of workers
    rank: int
    beat_s: float
    grace_s: float  # for running requests, when a signal asks the worker to stop
    role: RoleConfig | None = None


# -- to the worker --------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    id: int
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    eos_ids: list[int] = []
    guide: Guide | None = None  # of what its constraint is made, in every rank
    identity: bytes = b""  # as `Request.identity`
    adapter: int = 0
    outputs: list[int] = []  # as `Request.outputs` when it is submitted
    pieces: list[Piece] = []
    pictures: list[Picture] = []
    reader: str = ""  # as `Request.reader`


class Admit(msgspec.Struct, frozen=True, array_like=True, tag="admit"):
    """Sent by rank 0 to all ranks: the grammar of a submitted request is compiled."""

    id: int


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    id: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Take no more; finish what runs within so many seconds, abort the rest, leave."""

    grace_s: float


class Watch(msgspec.Struct, frozen=True, array_like=True, tag="watch"):
    """The engine is watched: for so many seconds, send heartbeats often, with a map of the pages."""

    seconds: float


class Pause(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """Take no step until `Resume`; requests are kept, or aborted."""

    call: int
    keep: bool


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    call: int


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """Give the device's memory back until `Wake`; at level 2 that of dropped weights, too."""

    call: int
    level: int = 1


class CheckSleep(msgspec.Struct, frozen=True, array_like=True, tag="check sleep"):
    """Could it sleep at this level?"""

    call: int
    level: int


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="wake"):
    call: int


class LoadWeights(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Serve with these weights from the next step on."""

    call: int
    version: int
    source: WeightsFrom


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load adapter"):
    """Keep the adapter in this folder, for requests of this number."""

    call: int
    number: int
    folder: str
    beside: bool = True  # read while steps go on; False: before the commands that follow


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload adapter"):
    call: int
    number: int


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    call: int


class FollowPages(msgspec.Struct, frozen=True, array_like=True, tag="follow"):
    """Report what the prefix cache can find, now and whenever it changes."""

    call: int


class SwitchRole(msgspec.Struct, frozen=True, array_like=True, tag="switch role"):
    """Take requests in another role from now on; refused while it is at work."""

    call: int
    role: RoleConfig


# Each is answered by a `Returned`.
Call = (
    Pause
    | Resume
    | Sleep
    | CheckSleep
    | Wake
    | LoadWeights
    | LoadAdapter
    | UnloadAdapter
    | ResetPrefixCache
    | FollowPages
    | SwitchRole
)
Command = Submit | Admit | Abort | Stop | Watch | Call


# -- from the worker ------------------------------------------------------------------------------


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The engine at a moment; counts."""

    steps: int = 0
    waiting: int = 0
    running: int = 0
    pages: int = 0
    pages_used: int = 0
    pages_cached: int = 0  # free, and would be found as a prefix
    prefix_tokens: int = 0  # of prompts looked up, since the start
    prefix_hits: int = 0  # of those, found
    preempted: int = 0  # since the start
    prompt_tokens: int = 0  # computed, since the start
    output_tokens: int = 0  # sampled, since the start
    host_s: float = 0.0  # of all steps, as in `Spent`
    device_s: float = 0.0
    at: float = 0.0  # when it was so, on time.monotonic
    remote_prefills: int = 0  # prompts that another server computed, since the start
    # Prompts that were asked for elsewhere and computed here, since the start.
    prefill_fallbacks: int = 0
    drafted: int = 0  # drafts that were verified, since the start
    accepted: int = 0  # of those, that held
    groups_used: tuple[int, ...] = ()  # of `pages_used`, those of each cache group
    draft_runs: int = 0  # times that drafts of a request were verified, since the start
    accepted_at: tuple[int, ...] = ()  # how often the first, second, .. draft held
    host_tokens: int = 0  # of prompts, loaded from the host's tier of the cache, since the start
    disk_tokens: int = 0  # and from the disk's
    failed_loads: int = 0  # since the start
    host_pages: int = 0  # that the tiers hold
    disk_pages: int = 0
    pictures: int = 0  # that the tower computed, since the start
    pictures_found: int = 0  # whose rows were there
    tower_s: float = 0.0  # of the tower; on a GPU, of launching it


class Scored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token's log-probability, and the likeliest tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]


class Ended(msgspec.Struct, frozen=True, array_like=True):
    id: int
    finish: Finish
    stop_reason: int | str | None
    error: str | None
    cached: int  # prompt tokens that were found in the prefix cache
    ledger: Ledger  # on the clock of time.monotonic, which all processes of a machine share
    handoff: bytes = b""  # as `Request.handoff`


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """Sent with the first token, so that it is known even if the end of the request is never read."""

    cached: int
    ledger: Ledger


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """The model as it was loaded; of one rank where several share it."""

    device: str = ""
    device_name: str = ""
    dtype: str = ""
    weights_bytes: int = 0  # that they take in memory, in all their forms
    # Of them, that a step of few tokens multiplies with; 0: it depends on the tokens.
    read_bytes: int = 0
    kv_bytes_per_token: float = 0.0
    ranks: int = 1
    page_bytes: int = 0  # of one page of the cache
    uuids: list[str] = []  # of the GPUs of all ranks, as NVML writes them


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """Tokens of a step: request `ids[i]` gets one token, or `counts[i]` tokens."""

    steps: int
    ids: list[int]
    tokens: list[int]  # of all requests, one behind the other
    logprobs: dict[int, list[Scored]]  # by request, for its tokens of this step
    prompts: dict[int, list[Scored]]  # by request, with its first token
    ended: list[Ended]
    begun: dict[int, Begun] = {}  # by request, with its first token
    pooled: dict[int, bytes] = {}  # by request: its prompt as a vector of float32
    counts: list[int] = []  # tokens of each request; empty: one each

    def runs(self) -> Iterator[tuple[int, list[int]]]:
        """Each request with its tokens."""
        at = 0
        for id, count in zip(self.ids, self.counts or [1] * len(self.ids), strict=True):
            yield id, self.tokens[at : at + count]
            at += count


class Pages(msgspec.Struct, frozen=True, array_like=True, tag="pages"):
    """Changes of the prefix cache in order, sent before the tokens of the same step."""

    events: list[tuple[bool, bytes]]  # as `PageEvent`


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    limits: Limits
    eos_ids: list[int]
    notes: list[str]
    facts: Facts = Facts()


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    stats: Stats
    steps: list[StepTimes] = []  # since the last beat, as far as they are remembered
    pages: PageMap = PageMap()  # while the engine is watched


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    """A call has been carried out, or could not be."""

    call: int
    kind: str = ""  # of the error
    message: str = ""
    hint: str | None = None


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The last words of a worker that cannot go on."""

    rank: int
    kind: str  # of the exception
    message: str
    hint: str | None
    traceback: str


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """The worker has stopped on request, with nothing left to do."""


Report = Tokens | Pages | Ready | Beat | Returned | Failure | Stopped

encode = msgspec.msgpack.Encoder().encode


def encode_submission(request: Submit) -> bytes:
    """The bytes of `encode([request])`, with pixels that are copied while other threads run.

    An encoder holds the interpreter lock for as long as it copies, half a second for 64 large pictures; `join` of large
    bytes releases it. The pixels take the place of a random mark that is encoded instead of them.
    """
    if not request.pictures:
        return encode([request])
    mark = os.urandom(16)
    marked = [msgspec.structs.replace(picture, pixels=mark) for picture in request.pictures]
    first, *others = encode([msgspec.structs.replace(request, pictures=marked)]).split(encode(mark))
    parts = [first]
    for picture, other in zip(request.pictures, others, strict=True):
        parts += [b"\xc6", len(picture.pixels).to_bytes(4, "big"), picture.pixels, other]  # bin 32
    return b"".join(parts)


decode_boot = msgspec.msgpack.Decoder(Boot).decode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
