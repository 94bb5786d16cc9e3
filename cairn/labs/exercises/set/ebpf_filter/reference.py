"""An XDP program in eBPF instructions: it drops UDP packets to one port and lets all others pass.

The context in R1 has two addresses of 4 bytes: where the packet begins (offset 0) and where it ends (offset 4).
    Ethernet 14 bytes | IPv4 20 | UDP 8            type at 12, version and length at 14, protocol at 23, port at 36
"""

from typing import NamedTuple

R0, R1, R2, R3, R4, R5 = range(6)  # R0 is what the program returns
DROP, PASS = 1, 2
UDP = 17


class Instruction(NamedTuple):
    opcode: int
    target: int = 0
    source: int = 0
    offset: int = 0
    value: int = 0
    label: str = ""  # where a jump goes


def load(size: int, target: int, source: int, offset: int) -> Instruction:
    """target = the `size` bytes (1, 2 or 4) at address source + offset, the first byte lowest."""
    return Instruction({1: 0x71, 2: 0x69, 4: 0x61}[size], target, source, offset)


def move(target: int, source: int) -> Instruction:
    return Instruction(0xBF, target, source)


def set_to(target: int, value: int) -> Instruction:
    return Instruction(0xB7, target, value=value)


def add(target: int, value: int) -> Instruction:
    return Instruction(0x07, target, value=value)


def jump_if_above(target: int, source: int, label: str) -> Instruction:
    """Goes to the label when target > source."""
    return Instruction(0x2D, target, source, label=label)


def jump_unless(target: int, value: int, label: str) -> Instruction:
    """Goes to the label when target is not this value."""
    return Instruction(0x55, target, value=value, label=label)


def leave() -> Instruction:
    return Instruction(0x95)


def as_loaded(field: int) -> int:
    """What `load(2, ...)` finds for this number in a header: the network sends the highest byte first."""
    # begin answer
    return (field & 0xFF) << 8 | field >> 8
    # end answer


def program(port: int) -> list[Instruction | str]:
    """Instructions, and labels in front of what they name."""
    # begin answer
    return [
        load(4, R2, R1, 0),
        load(4, R3, R1, 4),
        move(R4, R2),
        add(R4, 42),
        jump_if_above(R4, R3, "pass"),
        load(2, R5, R2, 12),
        jump_unless(R5, as_loaded(0x0800), "pass"),
        load(1, R5, R2, 14),
        jump_unless(R5, 0x45, "pass"),
        load(1, R5, R2, 23),
        jump_unless(R5, UDP, "pass"),
        load(2, R5, R2, 36),
        jump_unless(R5, as_loaded(port), "pass"),
        set_to(R0, DROP),
        leave(),
        "pass",
        set_to(R0, PASS),
        leave(),
    ]
    # end answer
