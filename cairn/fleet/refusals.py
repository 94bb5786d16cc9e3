"""Why the router refuses a request: no server has its model, or none has room. What it says to the client."""

from typing import TYPE_CHECKING

from cairn.core.errors import did_you_mean

if TYPE_CHECKING:
    from cairn.fleet.router import Router


def unknown_model(router: "Router", model: str | None, aliases: bool = True) -> str | None:
    """Of a name that no server has; None as long as one of them has not told its names.

    `aliases`: they are named to clients that ask for another name. A request for one has its model's name already.
    """
    names = {name for one in router.scaled for name in one.names}
    if model is None or model in names or not (names or router.workers):
        return None
    for one in router.workers:
        if one.hello is None or model in one.hello.models:
            return None
        names |= set(one.hello.models)
    names |= set(router.aliases.names if aliases else ())
    near = did_you_mean(model, sorted(names), otherwise=f"there are: {', '.join(sorted(names))}")
    return f"no server has the model {model[:200]!r}; {near}"


def why_nobody(router: "Router", now_s: float) -> str:
    states = "; ".join(
        f"{one.name} is full" if one.full else f"{one.name} is {one.state}: {one.why(now_s)}"
        for one in router.workers
    )
    return f"no server has room after {router.config.hold_s:g} s of waiting ({states})"
