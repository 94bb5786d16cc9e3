"""Events of a job with their times: the lines of RUN/recovery/events.jsonl.

    Submitted  Started  Trained  Stepped ... Failed  Started  Trained  Stepped ... Ended

The supervisor of a run appends them; `core/job_ledger` makes sums of them. Data only: no clock, no files.
"""

import msgspec


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="event", kw_only=True):
    at: float  # seconds on one clock, the same for all events of a job


class Submitted(Event, frozen=True):
    """The job exists; it may have to wait."""


class Started(Event, frozen=True):
    """Processes are started, from `step`."""

    step: int


class Trained(Event, frozen=True):
    """All ranks have their state; the first step begins."""


class Stepped(Event, frozen=True):
    """The step that ended now; `blocked`: seconds since the step before that training waited for checkpoints.

    `dragged`: seconds by which a slow rank has made steps longer, as far as it was not reported before.
    """

    step: int
    blocked: float = 0.0
    dragged: float = 0.0


class Failed(Event, frozen=True):
    """Found out now; `since`: the last moment in which all was well."""

    since: float
    cause: str
    rank: int | None = None
    node: int | None = None
    host: str = ""
    why: str = ""
    rung: str = ""  # what was done about it


class Paused(Event, frozen=True):
    """Stopped on purpose, to go on elsewhere; nothing is lost."""

    cause: str


class Noticed(Event, frozen=True):
    """Something to know that stops no rank: one that is far slower than the others."""

    what: str  # "straggler"; "straggler over" when it keeps up again
    rank: int
    host: str = ""
    step: int = 0
    why: str = ""


class Ended(Event, frozen=True):
    """The job is over."""

    finished: bool = True


AnyEvent = Submitted | Started | Trained | Stepped | Failed | Paused | Noticed | Ended
