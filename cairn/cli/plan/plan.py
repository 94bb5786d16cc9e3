"""`cairn plan train|serve`: does it fit, how fast, which layout, what does it cost. Prints; `cairn.plan` decides."""

from cairn.cli.plan import plan_serve, plan_train
from cairn.cli.subverbs import Subverb, dispatch

ABOUT = "Plan: predict training and serving before you buy or book the machines."


def run(args: list[str]) -> int:
    return dispatch("plan", ABOUT, SUBVERBS, args)


SUBVERBS: dict[str, Subverb] = {
    "train": Subverb(plan_train.run, "which layout trains a model fastest on these GPUs"),
    "serve": Subverb(plan_serve.run, "how many GPUs serve a model at this rate, and how fast"),
}
