"""How fast an answer was decoded, and how much of what the machine's memory allows. Knows no model."""

import msgspec

from cairn.core.errors import HardwareError
from cairn.core.units import format_bytes, format_rate


class Speed(msgspec.Struct, frozen=True):
    decode_tokens_per_s: float | None  # None: there was no second token
    limit_tokens_per_s: float | None  # every weight read once per token; None: not calibrated
    share: float | None


def speed_of(tokens: int, decode_s: float, device: str, read_bytes: float) -> Speed:
    """`read_bytes`: of the weights that each token visits."""
    measured = (tokens - 1) / decode_s if tokens > 1 and decode_s > 0 else None
    limit = _limit(device, read_bytes)
    share = measured / limit if measured and limit else None
    return Speed(decode_tokens_per_s=measured, limit_tokens_per_s=limit, share=share)


def in_words(speed: Speed, read_bytes: float) -> str:
    if not speed.decode_tokens_per_s:
        return "no decode"
    rate = f"{speed.decode_tokens_per_s:.1f} tokens/s"
    if not speed.limit_tokens_per_s or not speed.share:
        return f"{rate} (the limit is not known: run `cairn calibrate`)"
    weights = format_bytes(read_bytes, "decimal")
    bandwidth = format_rate(speed.limit_tokens_per_s * read_bytes, "B")
    return (
        f"{rate}, {speed.share:.0%} of the limit of {speed.limit_tokens_per_s:.0f}"
        f" ({weights} of weights at {bandwidth}{_doubt(speed.share)})"
    )


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


def _doubt(share: float) -> str:
    """Nothing is faster than its limit, but a limit that was measured on a busy machine is too low."""
    return (
        "; measured while the machine was busy? `cairn calibrate` does it again"
        if share > 1
        else ""
    )
