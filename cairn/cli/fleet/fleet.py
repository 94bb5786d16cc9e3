"""`cairn fleet`: many servers behind one address. Prints, decides nothing."""

from cairn.cli.fleet import fleet_apply, fleet_serve, fleet_status
from cairn.cli.subverbs import Subverb, dispatch

ABOUT = "A fleet: servers behind one router that knows what each of them has cached."


def run(args: list[str]) -> int:
    return dispatch("fleet", ABOUT, SUBVERBS, args)


SUBVERBS: dict[str, Subverb] = {
    "serve": Subverb(fleet_serve.run, "start the servers of a file and a router in front of them"),
    "apply": Subverb(fleet_apply.run, "run a fleet here, on Ray, on Slurm or on Kubernetes"),
    "status": Subverb(fleet_status.run, "the servers behind a router, and what they do"),
    "explain": Subverb(fleet_status.run_explain, "why a request went where it went"),
}
