"""A configuration for NCCL's example tuner plugin: which algorithm and protocol for which size.

    # colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff
    allreduce,0,1048576,ring,ll,4,1,8,-1,-1
    allreduce,1048577,18446744073709551615,nvls,simple,8,1,8,-1,-1

How the plugin reads it decides what is written:
- the first line that matches wins, unless NCCL cannot use that pair on this machine; so every
  collective ends with a line for any size that names ring/simple, which always works;
- the channels are always written: for -1, or for a size without a line, the plugin leaves one channel;
- a name that it does not know means allreduce, ring or simple to it, without a word; a heading that
  is no comment would be a rule. So names come from one table, and `read` refuses what is not in it.

Use: NCCL_TUNER_PLUGIN=libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=FILE, and NCCL_DEBUG_SUBSYS=TUNING
to see it at work.
"""

import msgspec

from cairn.comm.nccl_model import (
    NCCL_COLLECTIVES,
    Algorithm,
    NcclCalibration,
    NcclCluster,
    Protocol,
    choose,
)
from cairn.comm.schedule.ops import Collective
from cairn.core.errors import DataError

LAST_BYTE = (1 << 64) - 1  # the plugin's size_t
ANY = -1
SMALLEST = 256
LONGEST_LINE = 255  # the plugin's buffer, less its end
NAMES: dict[Collective, str] = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
THREADS = 512  # of a channel
BYTES_FOR_A_THREAD: dict[Protocol, int] = {"ll": 8, "ll128": 8, "simple": 64}


class TunerRule(msgspec.Struct, frozen=True, kw_only=True):
    collective: Collective
    least: int  # bytes
    most: int
    algorithm: Algorithm
    protocol: Protocol
    channels: int
    us: float | None = None  # predicted for the largest size that was looked at; None: the fallback


def rules(cluster: NcclCluster, calibration: NcclCalibration, largest: int) -> list[TunerRule]:
    """The fastest algorithm and protocol of each collective by size, evaluated at two sizes for each power of two."""
    sizes = [SMALLEST]
    while sizes[-1] < largest:
        power = SMALLEST << (len(sizes) // 2)
        sizes.append(power * 3 // 2 if len(sizes) % 2 else power)
    table: list[TunerRule] = []
    for collective in NCCL_COLLECTIVES:
        mine: list[TunerRule] = []
        for place, size in enumerate(sizes):
            best = choose(cluster, collective, size, calibration)
            channels = channels_for(cluster, best.algorithm, best.protocol, size)
            last = place == len(sizes) - 1
            rule = TunerRule(
                collective=collective,
                least=mine[-1].most + 1 if mine else 0,
                most=LAST_BYTE if last else size,
                algorithm=best.algorithm,
                protocol=best.protocol,
                channels=channels,
                us=best.us,
            )
            if mine and _same(mine[-1], rule):
                rule = msgspec.structs.replace(rule, least=mine.pop().least)
            mine.append(rule)
        table += [*mine, _fallback(cluster, collective)]
    return table


def channels_for(cluster: NcclCluster, algorithm: Algorithm, protocol: Protocol, size: int) -> int:
    """Number of channels, reduced as NCCL does while a thread would have less than its share of bytes."""
    fabric = cluster.fabric
    channels = fabric.nvls_channels if algorithm in ("nvls", "nvls_tree") else fabric.channels
    share = BYTES_FOR_A_THREAD[protocol]
    if (algorithm, protocol) == ("ring", "ll"):
        share *= cluster.ranks
    while channels > 1 and size < channels * THREADS * share:
        channels -= 1
    return channels


def render(cluster: NcclCluster, chosen: list[TunerRule]) -> str:
    """The text of the file."""
    head = (
        "# NCCL tuner configuration, written by `cairn comm tune`",
        "# colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff",
    )
    where = f"{cluster.nodes},{cluster.ranks},{ANY},{ANY}"
    lines = [
        f"{NAMES[rule.collective]},{rule.least},{rule.most},{rule.algorithm},{rule.protocol},"
        f"{rule.channels},{where}"
        for rule in chosen
    ]
    return "\n".join([*head, *lines]) + "\n"


def read(text: str) -> list[tuple[str, int, int, str, str, int, int, int, int, int]]:
    """The rules as the plugin reads them; what it would silently misread is an error here."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#") or not line:
            continue
        words = [word.strip(" \t") for word in line.split(",")]
        if not 8 <= len(words) <= 10 or len(line) > LONGEST_LINE:
            raise DataError(
                f"line {number}: {len(words)} fields, {len(line)} characters: {line[:80]!r}"
            )
        words += [str(ANY)] * (10 - len(words))
        vocabularies = ((NAMES.values(), words[0]), (ALGORITHMS, words[3]), (PROTOCOLS, words[4]))
        for choices, word in vocabularies:
            if word not in choices:
                raise DataError(
                    f"line {number}: unknown '{word}'", hint=f"one of {', '.join(choices)}"
                )
        try:
            low, high, *rest = (int(words[at]) for at in (1, 2, 5, 6, 7, 8, 9))
        except ValueError as error:
            raise DataError(f"line {number}: {error}") from None
        channels, nodes, ranks, pipe, registered = rest
        rows.append(
            (words[0], low, high, words[3], words[4], channels, nodes, ranks, pipe, registered)
        )
    return rows


def _fallback(cluster: NcclCluster, collective: Collective) -> TunerRule:
    return TunerRule(
        collective=collective,
        least=0,
        most=LAST_BYTE,
        algorithm="ring",
        protocol="simple",
        channels=cluster.fabric.channels,
    )


def _same(one: TunerRule, other: TunerRule) -> bool:
    return (one.algorithm, one.protocol, one.channels) == (
        other.algorithm,
        other.protocol,
        other.channels,
    )
