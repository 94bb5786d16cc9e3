"""Only a part of the state changes from one checkpoint to the next. How much has to travel?

    step 100   [embedding][layer 0][layer 1] ... [adapters]       all of it
    step 200   [   ==    ][  ==   ][  ==   ] ... [changed ]       the same bytes have the same hash: not sent again

The trainer's object store cuts a checkpoint at its tensors and keeps each content once. A full training run changes
everything in every step; a fine-tune of adapters changes a percent.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Rows, Table, Words
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.train.checkpoint.object_store import ObjectStore
    from cairn.train.checkpoint.piece import Piece
    from cairn.train.checkpoint.save import Saver

FROZEN, ADAPTERS = 16, 4


def state(frozen_numbers: int, adapter_numbers: int) -> "dict[str, Piece]":
    import torch

    from cairn.train.checkpoint.piece import whole

    draw = torch.Generator().manual_seed(0)
    pieces = {
        f"frozen {i}": whole(torch.randn(frozen_numbers, generator=draw)) for i in range(FROZEN)
    }
    return pieces | {
        f"adapter {i}": whole(torch.randn(adapter_numbers, generator=draw)) for i in range(ADAPTERS)
    }


def sent(
    bench: Workbench, saver: "Saver", store: "ObjectStore", step: int, pieces: "dict[str, Piece]"
) -> int:
    """Saves on disk, copies to the store; how many bytes travelled."""
    from cairn.train.checkpoint.folder import folder_of

    saver.save(step, pieces, {"step": step})
    return store.send(folder_of(bench.folder / "disk", step)).new_bytes


def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.train.checkpoint.load import load_pieces
    from cairn.train.checkpoint.object_store import ObjectStore
    from cairn.train.checkpoint.save import Saver

    frozen, adapter = bench.pick((1 << 19, 1 << 14), (1 << 17, 1 << 12))
    pieces = state(frozen, adapter)
    saver = Saver(bench.folder / "disk", keep=9, in_background=False)
    store = ObjectStore(f"file://{bench.folder}/store")
    bench.step("the first checkpoint")
    moved = [sent(bench, saver, store, 1, pieces)]
    for step in (2, 3, 4):
        bench.step(f"step {step}: only the adapters have changed")
        for name, piece in pieces.items():
            if name.startswith("adapter"):
                piece.tensor.add_(1.0)
        moved.append(sent(bench, saver, store, step, pieces))
    bench.step("everything has changed, as in full training")
    for piece in pieces.values():
        piece.tensor.add_(1.0)
    moved.append(sent(bench, saver, store, 5, pieces))
    bench.step("fetching step 3 back")
    wanted = {
        name: piece._replace(tensor=torch.empty_like(piece.tensor))
        for name, piece in pieces.items()
    }
    folder = store.fetch(3, bench.folder / "fetched")
    load_pieces(folder, wanted, together=False)
    # Two additions happened since step 3: one to the adapters at step 4, and one to everything at step 5.
    wrong = sum(
        not torch.allclose(
            wanted[name].tensor + (2.0 if name.startswith("adapter") else 1.0),
            piece.tensor,
            atol=1e-4,
        )
        for name, piece in pieces.items()
    )
    changed = ADAPTERS * adapter * 4
    rest = moved[1] - changed  # description of the tensors, marker
    rows = [[step, size / 1e6, size / moved[0]] for step, size in enumerate(moved, 1)]
    return Outcome(
        checks=_checks(changed, moved, rest, wrong),
        plots=[_plot(moved)],
        table=_table(rows),
    )


def _checks(changed: int, moved: list[int], rest: int, wrong: int) -> list[Check]:
    return [
        Check(
            what=Words(
                "bytes that travel when only the adapters changed",
                "只有 adapter 变化时传输的字节数",
            ),
            predicted=changed,
            measured=moved[1],
            unit="B",
            within=0.25,  # a few kilobytes of description for each tensor come along
        ),
        Check(
            what=Words("of those, description", "其中的描述信息"),
            predicted=1024 * (FROZEN + ADAPTERS),
            measured=rest,
            unit="B",
            kind="at_most",
        ),
        Check(
            what=Words("share that travels when everything changed", "全部变化时传输的比例"),
            predicted=1.0,
            measured=moved[4] / moved[0],
            unit="x",
            within=0.02,
        ),
        Check(
            what=Words("tensors of step 3 that came back wrong", "取回的第 3 步中错误的张量数"),
            predicted=0,
            measured=wrong,
            unit="tensors",
        ),
    ]


def _plot(moved: list[int]) -> Plot:
    return Plot(
        title=Words("Bytes sent by checkpoint", "每个 checkpoint 传输的字节"),
        x=Words("checkpoint", "checkpoint"),
        y=Words("MB", "MB"),
        lines={"sent": [(float(step), size / 1e6) for step, size in enumerate(moved, 1)]},
        log_y=True,
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("checkpoint", "checkpoint"),
            Words("sent, MB", "传输（MB）"),
            Words("of the first", "与首个之比"),
        ],
        rows=rows,
    )


LAB = Lab(
    name="incremental-checkpoint",
    area="cluster",
    title=Words("Checkpoints that send only what changed", "只传变化部分的 checkpoint"),
    hypothesis=Words(
        "A checkpoint whose frozen tensors have not changed sends the changed ones and a few kilobytes; where all "
        "weights move in every step nothing is saved. Any step comes back whole.",
        "冻结张量不变时只需传变化的张量和几 KB 描述；若每步所有权重都变，则一点也省不了。任何一步都能完整取回。",
    ),
    run=run,
    causes=(
        Words(
            "tensors are not cut apart in the file: one changed byte sends its neighbours",
            "文件中张量没有分开切：一个字节变化会连带邻居",
        ),
        Words(
            "files with times or counters in them differ every time", "含时间或计数的文件每次都不同"
        ),
    ),
    code=(
        "cairn/train/checkpoint/object_store.py:ObjectStore",
        "cairn/train/checkpoint/object_store.py:cuts_of",
        "cairn/train/checkpoint/save.py:Saver",
    ),
    reading=(
        "Check-N-Run: a Checkpointing System for Training Deep Learning Recommendation Models (2022)",
        "ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model Development (2024)",
    ),
    questions=(
        Question(
            Words(
                "Which training has checkpoints that shrink like this?",
                "哪些训练的 checkpoint 能这样缩小？",
            ),
            Words(
                "Adapters, frozen towers, recommendation models (a batch touches few rows of the embedding), "
                "experts that got no token. Dense training with Adam: none, every number moves.",
                "adapter 微调、冻结的塔、推荐模型（一个 batch 只碰少量 embedding 行）、没分到 token 的专家。"
                "稠密训练加 Adam：每个数都变，省不了。",
            ),
        ),
        Question(
            Words("What is the danger of long chains of differences?", "长的增量链有什么危险？"),
            Words(
                "To restore one needs all links, and one damaged link loses all after it. Content addressing has no "
                "chain: a manifest names every object it needs, and unused ones can be removed.",
                "恢复需要整条链，坏一环后面全丢。按内容寻址没有链：清单列出所需的全部对象，无人引用的可以删除。",
            ),
        ),
        Question(
            Words("How else can a checkpoint be made smaller?", "还能怎样缩小 checkpoint？"),
            Words(
                "Optimizer states in 8 bits, no copies of what replicas share, quantised differences. Losses must "
                "stay the same after a restart, so that is tested.",
                "8 比特优化器状态、不重复保存副本共享的部分、量化差分。重启后的损失必须一致，需要验证。",
            ),
        ),
    ),
    seconds=3.0,
)
