"""A small run of reinforcement learning for tests: sorting digits, a model of two layers, a byte-level tokenizer."""

from pathlib import Path
from typing import Any

import msgspec

from cairn.align.config import Align, Rollout, Task
from cairn.train.config import Checkpoint, Data, Model, Optim, Schedule

BASE = Align(
    steps=4,
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
    data=Data(sequence=48, sequences=32, microbatch=32),
    optim=Optim(lr=5e-4, weight_decay=0.0),
    schedule=Schedule(kind="constant"),
    task=Task(kind="sorting", numbers=3, held_out=8, every=0),
    rollout=Rollout(group=8, max_tokens=12),
    checkpoint=Checkpoint(every=0),
)


def tiny(out: Path | None, **changes: Any) -> Align:
    return msgspec.structs.replace(BASE, **({"out": out, "device": "cpu"} | changes))
