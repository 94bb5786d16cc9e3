"""Which replica gets a request."""

from dataclasses import dataclass, field


@dataclass
class Replica:
    load: int = 0  # requests under way
    cached: list[list[int]] = field(default_factory=list)  # prompts that it has seen
    up: bool = True


def matched(prompt: list[int], replica: Replica) -> int:
    """The longest common prefix of the prompt with one that the replica has seen."""
    # begin answer
    longest = 0
    for cached in replica.cached:
        same = 0
        while same < min(len(cached), len(prompt)) and cached[same] == prompt[same]:
            same += 1
        longest = max(longest, same)
    return longest
    # end answer


def choose(prompt: list[int], replicas: list[Replica], slack: float = 1.5) -> int:
    # begin answer
    live = [i for i, replica in enumerate(replicas) if replica.up]
    if not live:
        raise LookupError("no replica is up")
    best = max(live, key=lambda i: (matched(prompt, replicas[i]), -replicas[i].load, -i))
    mean = sum(replicas[i].load for i in live) / len(live)
    if replicas[best].load > slack * mean + 1:
        return min(live, key=lambda i: (replicas[i].load, i))
    return best
    # end answer
