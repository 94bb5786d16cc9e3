"""Messages between ranks and memory agents about copies. Types only; `peer_link` transfers them."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Reserve(Message, frozen=True):
    """Room for two copies of one rank's state; answered by Room and a descriptor."""

    generation: int
    rank: int
    size: int  # of one copy
    world: int = 0  # of how many ranks it is one


class Room(Message, frozen=True):
    size: int  # of one copy; two lie side by side
    steps: tuple[int, int]  # what lies there already; -1: nothing


class Written(Message, frozen=True):
    """A copy is complete; the agent sends it on to the other node."""

    generation: int
    rank: int
    step: int
    slot: int
    used: int
    cuts: list[int]  # where its parts begin, each at a word: each has a checksum of its own


class Put(Message, frozen=True):
    """Agent to agent: `used` bytes of a copy follow."""

    generation: int
    rank: int
    step: int
    used: int
    cuts: list[int]
    sums: list[int]  # of the 64-bit words of each part
    world: int = 0


class Done(Message, frozen=True):
    fine: bool = True
    why: str = ""


class Ask(Message, frozen=True):
    """Request for the list of copies."""


class HeldCopy(msgspec.Struct, frozen=True):
    generation: int
    rank: int
    step: int
    used: int
    check: int  # sum of all its 64-bit words; 0: not summed yet
    world: int = 0  # of how many ranks it is one; 0: unknown


class Holdings(Message, frozen=True):
    copies: list[HeldCopy]


class Open(Message, frozen=True):
    """Request on the same node for the memory of a rank's copies, answered by Room and a file descriptor."""

    generation: int
    rank: int
    step: int


class Fetch(Message, frozen=True):
    """Request for ranges of a copy, which follow the answer in order."""

    generation: int
    rank: int
    step: int
    stretches: list[tuple[int, int]]  # offset, length


class Parts(Message, frozen=True):
    """Request for the checksums of a copy's parts, answered by Sums."""

    generation: int
    rank: int
    step: int


class Sums(Message, frozen=True):
    cuts: list[int]
    sums: list[int]  # as they were when the copy was complete


class Forget(Message, frozen=True):
    """Copies that cannot be gone on from: of generations before this one, and of its steps after `after`."""

    generation: int
    after: int


class Keep(Message, frozen=True):
    """Tell an agent the address that keeps copies of its ranks; empty for none."""

    address: str


AnyMessage = (
    Reserve
    | Room
    | Written
    | Put
    | Done
    | Ask
    | Holdings
    | Open
    | Fetch
    | Parts
    | Sums
    | Forget
    | Keep
)
