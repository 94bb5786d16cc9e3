"""Who gets the next task (dominant resource fairness, Ghodsi et al. 2011)."""

from typing import NamedTuple


class User(NamedTuple):
    name: str
    needs: tuple[float, float]  # GPUs and memory of one task
    weight: float = 1.0


def dominant_share(
    used: tuple[float, float], capacity: tuple[float, float], weight: float
) -> float:
    # begin answer
    return max(u / c for u, c in zip(used, capacity, strict=True)) / weight
    # end answer


def allocate(users: list[User], capacity: tuple[float, float]) -> dict[str, int]:
    """How many tasks each user gets before nothing fits any more; ties go to who is listed first."""
    # begin answer
    tasks = {user.name: 0 for user in users}
    free = list(capacity)

    def share_of(user: User) -> float:
        count = tasks[user.name]
        used = (user.needs[0] * count, user.needs[1] * count)
        return dominant_share(used, capacity, user.weight)

    while True:
        fitting = [
            u for u in users if all(n <= room + 1e-9 for n, room in zip(u.needs, free, strict=True))
        ]
        if not fitting:
            return tasks
        chosen = min(fitting, key=share_of)
        tasks[chosen.name] += 1
        free = [room - need for room, need in zip(free, chosen.needs, strict=True)]
    # end answer
