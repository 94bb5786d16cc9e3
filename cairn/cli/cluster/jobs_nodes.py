"""`cairn jobs nodes`: which nodes jobs leave out, and why; a person adds to the list or takes off it."""

import socket
import time
from typing import TYPE_CHECKING, Annotated

import msgspec

from cairn.core.config import load

if TYPE_CHECKING:
    from cairn.core.cordon import Cordons


NodeName = Annotated[str, msgspec.Meta(min_length=1)]


class Nodes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes that are left out, and nodes that have failed within a day; each with the reason."""

    cordon: NodeName | None = None
    """leave this node out until it is lifted"""
    why: str = "by hand"
    """the reason, for those who read the list"""
    lift: str | None = None
    """use this node again; what it did is forgiven"""
    check: bool = False
    """is this machine fit for work? If it is not, it goes on the list, and the exit status is 1"""
    json: bool = False


def run_nodes(args: list[str]) -> int:
    options = load(Nodes, args=args, env_prefix="CAIRN_JOBS_NODES_").value
    from cairn.cluster import cordon_list
    from cairn.core import cordon

    now, host = time.time(), socket.gethostname()
    before = cordons = cordon_list.current(now)
    if options.cordon is not None:
        cordons = cordons.cordon(options.cordon, now, options.why)
    if options.lift is not None:
        cordons = _lifted(cordons, options.lift, now)
    complaints = _complaints(host) if options.check else []
    if complaints:
        cordons = cordons.cordon(host, now, "; ".join(complaints))
    if cordons != before:
        cordon.save(cordon_list.path(), cordons)
    if options.json:
        found = {"cordons": cordons.cordons, "strikes": cordons.strikes, "complaints": complaints}
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        if options.check:
            print(f"this machine, {host}: {'; '.join(complaints) or 'fit for work'}")
        _show(cordons, now)
    return 1 if complaints else 0


def _show(cordons: "Cordons", now: float) -> None:
    out = cordons.excluded(now)
    names = list(dict.fromkeys([*out, *(strike.node for strike in cordons.strikes)]))
    for name in names:
        strikes = [strike for strike in cordons.strikes if strike.node == name]
        state = f"left out: {out[name]}" if name in out else "used"
        last = f"; {len(strikes)} failures, the last: {strikes[-1].why}" if strikes else ""
        print(f"{name}  {state}{last}")
    if not names:
        print("no node is left out, and none has failed within a day")


def _lifted(cordons: "Cordons", node: str, now: float) -> "Cordons":
    from cairn.core.errors import UsageError, did_you_mean

    known = {*(c.node for c in cordons.cordons), *(s.node for s in cordons.strikes)}
    if node not in known:
        raise UsageError(
            f"node '{node}' is not on the cordon list",
            hint=did_you_mean(node, sorted(known), otherwise="`cairn jobs nodes` has the list"),
        )
    return cordons.lift(node, now)


def _complaints(host: str) -> list[str]:
    """Everything that is wrong with this machine; its jobs write where the records are."""
    from cairn.cluster import health, records

    folder = records.state_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return health.judge(health.measure(host, folder))
