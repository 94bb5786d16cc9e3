"""Decode speed of an answer, and its share of the memory-bandwidth limit.

A speed above the limit shows that the limit is wrong: the bandwidth was measured while the machine was busy, so it is
measured again and kept; or the weights lie in the processor's cache. No share is given where it would be above 1.
"""

from contextlib import suppress
from pathlib import Path

import msgspec

from cairn.core.errors import HardwareError
from cairn.core.units import format_bytes, format_rate

IN_CACHE = "these weights fit into the processor's cache"
DOUBTED = "measured while the machine was busy? `cairn calibrate` does it again"


class Speed(msgspec.Struct, frozen=True):
    decode_tokens_per_s: float | None  # None: there was no second token
    limit_tokens_per_s: float | None  # every weight read once per token; None: not calibrated
    share: float | None  # None: one of them is not known, or the limit does not hold
    limit_note: str = ""  # why it does not


def speed_of(tokens: int, decode_s: float, device: str, read_bytes: float) -> Speed:
    """`read_bytes`: of the weights that each token visits."""
    measured = (tokens - 1) / decode_s if tokens > 1 and decode_s > 0 else None
    limit, note = _limit(device, read_bytes), ""
    if measured and limit and measured > limit:
        if device == "cpu" and _in_cache(read_bytes):
            note = IN_CACHE
        else:
            limit = _measured_again() / read_bytes
            note = DOUBTED if measured > limit else ""
    share = measured / limit if measured and limit and not note else None
    return Speed(measured, limit, share, note)


def in_words(speed: Speed, read_bytes: float) -> str:
    """Empty where no token was decoded: the first one comes from the prefill."""
    if not speed.decode_tokens_per_s:
        return ""
    rate = f"{speed.decode_tokens_per_s:.1f} tokens/s"
    if not speed.limit_tokens_per_s:
        return f"{rate} (the limit is not known: run `cairn calibrate`)"
    weights = format_bytes(read_bytes, "decimal")
    bandwidth = format_rate(speed.limit_tokens_per_s * read_bytes, "B")
    limit = f"{speed.limit_tokens_per_s:.0f} ({weights} of weights at {bandwidth}"
    if speed.share is None:
        return f"{rate}, above the memory's limit of {limit}; {speed.limit_note})"
    return f"{rate}, {speed.share:.0%} of the limit of {limit})"


def _limit(device: str, read_bytes: float) -> float | None:
    """Tokens/s if each token did nothing but read the weights it visits once."""
    from cairn.hw.ceilings import load as load_ceilings

    try:
        ceilings = load_ceilings()
    except HardwareError:
        return None
    other = ceilings.device.split(":")[0] != device.split(":")[0]
    if ceilings.copy is None or other or not read_bytes:
        return None
    return ceilings.copy.value / read_bytes


def _in_cache(read_bytes: float) -> bool:
    from cairn.hw.host import read_cpu

    return read_bytes <= (read_cpu(Path("/")).last_level_bytes or 0)


def _measured_again() -> float:
    """The memory's bandwidth, which is kept if it is higher than the one that was stored."""
    from cairn.hw.calibrate import copy_again
    from cairn.hw.ceilings import load, machine_file, save
    from cairn.hw.probe import probe

    stored = load()
    found = copy_again(stored, probe())
    if found is not stored:
        with suppress(
            HardwareError
        ):  # where it cannot be written the next answer measures it again
            save(found, machine_file())
    return found.copy.value if found.copy is not None else 0.0
