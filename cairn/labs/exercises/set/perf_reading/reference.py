"""What perf counted, and what it means."""

PAGE = 4096
MUCH_MEMORY = 16 << 20  # bytes


def read_counters(text: str) -> dict[str, float | None]:
    """By event; None where the machine has no such counter. task-clock is in milliseconds."""
    counters: dict[str, float | None] = {}
    # begin answer
    for line in text.splitlines():
        fields = line.split(",")
        if len(fields) < 3:
            continue
        value, event = fields[0], fields[2]
        counters[event] = None if value.startswith("<") else float(value)
    # end answer
    return counters


def touched_bytes(faults: float, idle_faults: float) -> float:
    """Memory that a program touched for the first time, beside a process that does nothing."""
    # begin answer
    return (faults - idle_faults) * PAGE
    # end answer


def cause(
    before: dict[str, float | None], after: dict[str, float | None], more_wall_s: float
) -> str:
    """Why the second run took `more_wall_s` longer: "memory", "computing" or "waiting"."""
    # begin answer
    faults = (after["page-faults"] or 0) - (before["page-faults"] or 0)
    if faults * PAGE >= MUCH_MEMORY:
        return "memory"
    more_cpu_s = ((after["task-clock"] or 0) - (before["task-clock"] or 0)) / 1e3
    if more_cpu_s >= 0.5 * more_wall_s:
        return "computing"
    return "waiting"
    # end answer
