"""Request of the engine: its parameters, progress and result.

The scheduler moves the fields, the runner reads them, the loop writes the times of the ledger. A request knows no
clock, no queue and no page but the numbers of its own. It is compared by identity: an id may be used again later.

    prompt  p p p p p p p p | outputs o o o | in flight ? ?
            <---- computed: KV entries written, or to be written by steps already scheduled ---->
            <---------------------- total = len(prompt) + len(outputs) + pending ---------------->

A request decodes when `total - computed` is 1. Its last token is never computed, only returned. While drafts of it are
being verified, both count as if all of them held; they go down again when some turn out not to.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from cairn.core.errors import RequestError
from cairn.models.cache import ONE_GROUP, CacheGroup, most_pages
from cairn.models.vision.picture import Picture
from cairn.serve.engine.constraint import Constraint
from cairn.serve.engine.pieces import Piece
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.spans import longest_span
from cairn.serve.engine.step_times import NOTHING, Spent
from cairn.serve.tiers.load_plan import Loading

RequestId = str | int
State = Literal["waiting", "running", "finished"]
Finish = Literal["stop", "length", "abort", "error"]
Policy = Literal["fcfs", "shortest"]
Answers = Literal["text", "vectors", "transcripts"]
LARGEST_VOCABULARY = 2**31
MOST_DRAFTS = 31  # of one request in a step: what one program of `kernels.accept_tokens` compares
# A draft that the device makes; `kernels.draft_ngrams` puts a token in its place.
DRAFTED = -(2**31)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of an engine, fixed before the first request."""

    rows: int  # most requests that run at the same time
    step_tokens: int  # most tokens computed in one step
    context: int  # most tokens of one request, prompt and outputs together
    pages: int  # of the cache, the null page 0 included
    page_size: int  # tokens
    vocabulary: int
    policy: Policy = "fcfs"
    groups: tuple[CacheGroup, ...] = ONE_GROUP  # of layers, by what they keep in the cache
    states: int = 0  # slots for states of running requests and for snapshots of them
    prefill_chunk: int = 0  # most prompt tokens of one request in a step; 0: only the budget counts
    # Most tokens of a step that also decodes; 0: as in any other.
    mixed_step_tokens: int = 0
    arena_rows: int = 0  # embeddings of pieces that wait to be computed
    axes: bool = False  # rotary positions know rows and columns of pictures
    drafts: int = 0  # most drafted tokens of one request that a step verifies
    device_drafts: bool = False  # rows keep their texts on the device, which drafts from them
    answers: Answers = "text"  # what comes of a request; a text encoder has vectors

    def __post_init__(self) -> None:
        for name in ("rows", "step_tokens", "context", "page_size", "vocabulary"):
            _at_least(name, getattr(self, name), 1)
        _at_least("pages", self.pages, 2)  # page 0 is never given out
        _at_least("states", self.states, len(self.groups) - self.page_tables)
        _at_least("prefill_chunk", self.prefill_chunk, 0)
        _at_least("mixed_step_tokens", self.mixed_step_tokens, 0)
        if self.mixed_step_tokens and not self.rows <= self.mixed_step_tokens <= self.step_tokens:
            raise RequestError(
                f"mixed_step_tokens is {self.mixed_step_tokens}",
                hint=f"all {self.rows} rows decode in a step of at most {self.step_tokens} tokens",
            )
        if not 0 <= self.drafts <= MOST_DRAFTS:
            raise RequestError(f"drafts is {self.drafts}", hint=f"it can be up to {MOST_DRAFTS}")
        if self.vocabulary > LARGEST_VOCABULARY:
            raise RequestError(f"vocabulary is {self.vocabulary}", hint="a token id has 31 bits")
        if self.policy not in ("fcfs", "shortest"):
            raise RequestError(f"policy is {self.policy!r}", hint="it has to be fcfs or shortest")

    def budget(self, decoding: bool) -> int:
        """Most tokens of the next step."""
        return self.mixed_step_tokens or self.step_tokens if decoding else self.step_tokens

    @property
    def longest_text(self) -> int:
        """Most tokens of a text that is pooled: a model that generates has to have room for a token behind it."""
        return self.context - (self.answers == "text")

    @property
    def page_tables(self) -> int:
        """Number of cache groups with block tables."""
        return sum(group.kind != "state" for group in self.groups)

    def pages_for(self, request: "Request") -> int:
        """Pages of the cache that a request of its present length may need at once."""
        span = longest_span(request) if request.pieces else 0
        return most_pages(self.groups, request.known, self.page_size, span)

    @property
    def capacity(self) -> int:
        """Tokens of a single request that fit into the cache; the whole context if all layers have windows."""
        size = self.page_size
        places = range(1, max(self.pages - 1, -(-self.context // size)) + 1)
        fit = bisect_right(
            places, self.pages - 1, key=lambda n: most_pages(self.groups, n * size, size)
        )
        return fit * size


class Ledger(msgspec.Struct):
    """Timings of a request: moments of the loop's clock (0 until known), durations in seconds, counts.

    arrived <= admitting <= scheduled <= first_token <= finished
    """

    arrived: float = 0.0
    scheduled: float = 0.0  # first admitted: the decision was made
    first_token: float = 0.0
    finished: float = 0.0
    preemptions: int = 0
    prefill_chunks: int = 0
    admitting: float = 0.0  # the decision that admitted it began
    allocation: float = 0.0  # seconds in the block manager, the search for its prefix included
    pages: int = 0  # that it was given, those that it found included
    requeued: float = 0.0  # seconds without a row after preemptions
    prefill: Spent = NOTHING  # what the engine did from its admission to its first token
    decode: Spent = NOTHING  # and from there to its end
    drafted: int = 0  # drafts of it that were verified
    accepted: int = 0  # of those, that held
    host_tokens: int = 0  # of its prompt, that came from the host's tier of the cache
    disk_tokens: int = 0  # and from the disk's
    load: float = 0.0  # seconds that it waited for them
    # Seconds of loading and decoding its pictures, and of the tower's call that had them.
    media: float = 0.0


class Request:
    __slots__ = (
        "adapter",
        "arrival",
        "axes",
        "blocks",
        "cached",
        "checked",
        "computed",
        "constraint",
        "drafted",
        "end",
        "eos_ids",
        "error",
        "expected",
        "finish",
        "handoff",
        "hashes",
        "hoped",
        "id",
        "identity",
        "is_adjusted",
        "ledger",
        "loading",
        "mark",
        "media",
        "min_tokens",
        "more_blocks",
        "most_outputs",
        "outputs",
        "params",
        "pictures",
        "piece_rows",
        "pieces",
        "prefill_until",
        "priority",
        "prompt",
        "publish_at",
        "published",
        "reader",
        "row",
        "salt",
        "scored_from",
        "segment",
        "state",
        "states",
        "steps_in_flight",
        "stop_ids",
        "stop_reason",
        "total",
    )

    def __init__(
        self,
        id: RequestId,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        identity: bytes = b"",
        adapter: int = 0,
        pieces: Sequence[Piece] = (),
        piece_rows: Sequence[int] = (),
        pictures: Sequence[Picture] = (),
        segment: int = 0,
        media: object = None,
        eos_ids: Iterable[int] = (),
        constraint: Constraint | None = None,
        outputs: Iterable[int] = (),
        reader: str = "",
        scored_from: int = 0,
    ) -> None:
        """`outputs`: tokens of its answer that were made elsewhere; the engine goes on behind them."""
        # what was asked
        self.id = id
        self.prompt: list[int] = prompt if isinstance(prompt, list) else list(prompt)
        self.params = params
        self.priority = priority  # lower runs first
        self.salt = salt  # requests of different salts share no page
        # Of the weights and adapter that compute it; others' pages are not found.
        self.identity = identity
        self.media = media  # audio, for a speech model
        # With `prompt_logprobs`: those of tokens before this one are not wanted.
        self.scored_from = scored_from
        self.reader = reader  # of a prefill server: who may read its pages while it is computed
        self.segment = segment  # where the second text of a pair begins; 0: there is one text
        self.adapter = adapter  # its number in `engine.adapters`; 0: the model itself
        self.eos_ids = frozenset(eos_ids)
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self.eos_ids
        )
        self.min_tokens = params.min_tokens
        # Its logits are changed before a draw; asked for several times in every step.
        self.is_adjusted = bool(params.logit_bias) or is_penalised(params)
        self.constraint = constraint  # a grammar that its outputs follow; has accepted `outputs`
        self.checked = False  # by `check_request`
        self.pieces = pieces  # spans of the prompt whose embeddings lie in the arena
        self.piece_rows = list(piece_rows)  # the first row of each
        self.pictures = pictures  # what the pieces show, for a model that sees
        self.axes: Any = None  # of its prompt, once `engine.spans` was asked
        # how far it is
        self.state: State = "waiting"
        self.arrival = -1  # the order of arrival, given by the scheduler
        self.outputs: list[int] = list(outputs)  # tokens that the host knows
        self.computed = 0
        self.total = len(self.prompt) + len(self.outputs)
        self.most_outputs = 0  # max_tokens, or what the context leaves; given by the scheduler
        self.end = 0  # len(prompt) + most_outputs
        self.prefill_until = 0  # tokens that were known at admission; behind them it decodes
        self.row = -1  # of the batch; -1: not running
        # Its pages in the first cache group, in the order of its tokens.
        self.blocks: list[int] = []
        self.more_blocks: list[list[int]] = []  # and in each of the others; equally long
        self.states: list[int] = []  # of each group with a state, the page that it lies in
        self.cached = 0  # tokens found in the prefix cache when it was first admitted
        self.loading: Loading | None = None  # pages that a tier brings; it waits for them
        # what the prefix cache remembers about it
        self.hashes: list[bytes] = []  # of its full pages; survive a preemption
        self.published = 0  # how many pages of `blocks` have been offered to others
        self.publish_at = 0  # this many outputs fill the next page
        # what a drafter is asked with; only where there is one
        self.drafted = 0  # drafts in flight: so many of `pending` may not come
        self.steps_in_flight = 0  # that draw tokens for it
        self.expected = 0  # tokens that those steps bring, as far as is known
        self.hoped: list[int] = []  # the first of them, as the drafter guesses
        # how it ended
        self.finish: Finish | None = None
        self.stop_reason: int | str | None = None  # the stop token id or string; None for eos
        self.error: str | None = None
        self.handoff = b""  # of a prefill server: what a decode server goes on with
        self.ledger = Ledger()
        self.mark = NOTHING  # the engine's totals when its present phase began

    @property
    def pending(self) -> int:
        """Tokens in flight, if every draft holds: a scheduled step makes them, the host has not seen them."""
        return self.total - len(self.prompt) - len(self.outputs)

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.outputs)

    @property
    def reusable(self) -> int:
        """Its first tokens that may come from a cache: the logits of others are needed, or all that the model says."""
        most = self.known - 1
        return min(most, max(0, self.scored_from - 1)) if self.params.whole_prompt else most

    def __repr__(self) -> str:
        return (
            f"<Request {self.id} {self.finish or self.state}: prompt {len(self.prompt)}, "
            f"outputs {len(self.outputs)}+{self.pending}, computed {self.computed}>"
        )


def special(request: Request) -> bool:
    """Do its draws need more than one kernel gives, such as what the host knows about the tokens before?"""
    if request.is_adjusted or request.constraint is not None:
        return True
    return len(request.outputs) < request.min_tokens


def is_penalised(params: SamplingParams) -> bool:
    additive = params.presence_penalty != 0 or params.frequency_penalty != 0
    return additive or params.repetition_penalty != 1


def _at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"{name} is {value!r}", hint=f"it has to be at least {least}")
