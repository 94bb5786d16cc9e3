"""Tokens to experts and back: the all-to-all of a mixture, over NVLink inside a node and NICs between.

    dispatch   every token goes to the GPUs of its experts; to another node once over the rail, and
               from there over NVLink to each GPU that wants it (DeepEP's normal kernels)
    low latency   every copy of a token goes to its GPU by itself, and nothing is forwarded

Three constants: launch, NIC, NVLink. Experts are chosen evenly. Does not know: SMs and how many work,
imbalance between experts, quantisation kernels.
"""

import msgspec

from cairn.core.errors import ConfigError


class ExpertExchange(msgspec.Struct, frozen=True, kw_only=True):
    ranks: int  # of expert parallelism
    tokens: int  # of each rank
    hidden: int
    experts_per_token: int
    bytes_per_value: float
    domain: int = 8
    groups: int = 4  # nodes that a token may go to, at most


class ExpertMachine(msgspec.Struct, frozen=True, kw_only=True):
    launch_us: float
    nic_gb_per_s: float
    nvlink_gb_per_s: float


def nodes_of(exchange: ExpertExchange) -> int:
    if exchange.ranks < 2 or exchange.domain < 1:
        raise ConfigError(f"experts on {exchange.ranks} ranks", hint="two or more")
    return max(1, exchange.ranks // exchange.domain)


def direct_us(exchange: ExpertExchange, machine: ExpertMachine) -> float:
    """Low latency: each of the copies by itself, those of the own node over NVLink at the same time."""
    nodes = nodes_of(exchange)
    per_token = exchange.experts_per_token * exchange.hidden * exchange.bytes_per_value
    moved, away = exchange.tokens * per_token, 1 - 1 / nodes
    far = moved * away / (1e3 * machine.nic_gb_per_s)
    near = moved * (1 - away) / (1e3 * machine.nvlink_gb_per_s)
    return machine.launch_us + max(far, near)


def forwarded_gb_per_s(exchange: ExpertExchange, machine: ExpertMachine) -> float:
    """Normal kernels: bytes to nodes per time, own node included, as DeepEP counts them.

    In one node there is nothing to forward, and the bytes to GPUs are counted.
    """
    nodes = nodes_of(exchange)
    if nodes == 1:
        return machine.nvlink_gb_per_s
    visited = min(nodes, exchange.groups)
    there = exchange.experts_per_token / visited  # experts of a token on each node it goes to
    copies = exchange.domain * (1 - (1 - 1 / exchange.domain) ** there)  # distinct GPUs
    return min(machine.nic_gb_per_s / (1 - 1 / nodes), machine.nvlink_gb_per_s / copies)
