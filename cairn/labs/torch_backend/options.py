"""Options of a process group: in code, or from CAIRN_COMM_* in the environment.

    dist.init_process_group("cairn", pg_options=Options(deterministic=True))
    CAIRN_COMM_DETERMINISTIC=1 torchrun ...

What one rank says about schedules must be said by all: they choose each for itself, and alike.
"""

import os
from typing import get_type_hints

import msgspec

from cairn.core.errors import ConfigError, did_you_mean
from cairn.labs.torch_backend.choice import CANDIDATES

PREFIX = "CAIRN_COMM_"
# Flags of `cairn comm` may stand in the environment too, under the names of its verbs.
VERBS = ("verify_", "export_", "bench_", "tune_", "doctor_", "simulate_")
KIB = 1 << 10
EACH_RANK = 16 << 20


class Options(msgspec.Struct, frozen=True, kw_only=True):
    deterministic: bool = False  # sums in the order of the ranks, whatever the size
    schedule: str = ""  # always this one, where the collective has it
    address: str = ""  # of this host; without it the one that reaches the store
    port: int = 0  # to listen on; 0: any that is free
    host: str = ""  # ranks that say the same share memory; without it the kernel is asked
    tcp_gbit: float = 10.0  # of the network between hosts, for the choice of schedules
    tcp_alpha_us: float = 60.0  # from posting a message to having it
    spin_us: float = 20.0  # look this long for a message before sleeping
    # Bytes of one place in shared memory; 0: 1 MiB, less where many ranks share a host.
    piece: int = 0
    places: int = 8  # of each connection in shared memory
    dump: str = ""  # where a group that fails writes its last operations: this and the rank


def from_environment(environ: os._Environ[str] | dict[str, str] = os.environ) -> Options:
    """Read CAIRN_COMM_*; an unknown name or a value of the wrong type raises."""
    kinds = get_type_hints(Options)
    values: dict[str, str] = {}
    for name, text in environ.items():
        field = name.removeprefix(PREFIX).lower()
        if not name.startswith(PREFIX) or field.startswith(VERBS):
            continue
        if field not in kinds:
            hint = did_you_mean(field, kinds, f"there are: {', '.join(kinds)}")
            raise ConfigError(f"{name} is no setting of the backend", hint=hint)
        values[field] = text
    try:
        return checked(msgspec.convert(values, Options, strict=False))
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{PREFIX}*: {error}", hint="see cairn.labs.torch_backend.Options"
        ) from None


def piece_bytes(options: Options, local: int) -> int:
    """Bytes of one slot such that the connections of a rank take at most `EACH_RANK` bytes."""
    if options.piece:
        return options.piece
    share = EACH_RANK // (options.places * max(local - 1, 1))
    return min(max(1 << (max(share, 1).bit_length() - 1), 64 * KIB), 1024 * KIB)


def checked(options: Options) -> Options:
    if options.piece < 0 or options.piece % 64 or options.places < 1:
        raise ConfigError(
            f"{options.places} places of {options.piece} bytes",
            hint="one place or more, of a multiple of 64 bytes",
        )
    if options.tcp_gbit <= 0 or options.tcp_alpha_us < 0 or options.spin_us < 0:
        raise ConfigError(
            f"tcp_gbit {options.tcp_gbit}, tcp_alpha_us {options.tcp_alpha_us}, spin_us {options.spin_us}",
            hint="rates are positive, times are not negative",
        )
    known = {name for names in CANDIDATES.values() for name in names}
    if options.schedule and options.schedule not in known:
        there = f"one of {', '.join(sorted(known))}"
        raise ConfigError(
            f"no schedule '{options.schedule}' to run always",
            hint=did_you_mean(options.schedule, known, there),
        )
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"port {options.port}", hint="0 for any, or 1 to 65535")
    return options
