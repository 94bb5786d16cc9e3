"""Recipes of reinforcement learning by name. No torch."""

from collections.abc import Callable

import msgspec

from cairn.align.config import Algorithm, Align, Rollout, Task
from cairn.train.config import Checkpoint, Data, Log, Model, Optim, Schedule
from cairn.train.recipes import no_recipe


def recipe(name: str) -> Align:
    build = RECIPES.get(name)
    if build is None:
        raise no_recipe(name, RECIPES)
    return build()


def _tiny_sort() -> Align:
    """A small model that imitates answers of which many are wrong, and learns by trying which ones are right."""
    return Align(
        steps=260,
        warm_up=200,
        warm_up_until=0.3,
        warm_up_mistakes=0.6,
        model=Model(
            preset="tiny-qwen3",
            layers=2,
            hidden=64,
            heads=4,
            kv_heads=2,
            head_dim=16,
            intermediate=192,
            context=64,
        ),
        data=Data(sequence=24, sequences=64, microbatch=64),
        optim=Optim(lr=5e-4, weight_decay=0.0),
        schedule=Schedule(kind="constant"),
        task=Task(kind="sorting", numbers=3, held_out=64, every=10),
        rollout=Rollout(group=8, max_tokens=6),
        algorithm=Algorithm(kind="grpo"),
        checkpoint=Checkpoint(every=0),
        log=Log(every=20),
    )


def _tiny_ppo() -> Align:
    """The same by PPO: a value head in place of groups."""
    return msgspec.structs.replace(_tiny_sort(), algorithm=Algorithm(kind="ppo"))


def _tiny_tool() -> Align:
    """The same model learns what to ask a calculator: it has seen the right question and a wrong one."""
    return msgspec.structs.replace(
        _tiny_sort(),
        data=Data(sequence=64, sequences=64, microbatch=64),
        task=Task(kind="calculator", turns=1, held_out=64, every=10),
        rollout=Rollout(group=8, max_tokens=32),
    )


RECIPES: dict[str, Callable[[], Align]] = {
    "tiny-sort": _tiny_sort,
    "tiny-ppo": _tiny_ppo,
    "tiny-tool": _tiny_tool,
}
