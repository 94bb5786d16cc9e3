"""Only a part of the state changes from one checkpoint to the next. How much has to travel?

    step 100   [embedding][layer 0][layer 1] ... [adapters]       all of it
    step 200   [   ==    ][  ==   ][  ==   ] ... [changed ]       the same bytes have the same hash: not sent again

The trainer's object store cuts a checkpoint at its tensors and keeps each content once. A full training run changes
everything in every step; a fine-tune of adapters changes a percent.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Rows, Table, Words, described
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
    targets = {
        name: piece._replace(tensor=torch.empty_like(piece.tensor))
        for name, piece in pieces.items()
    }
    folder = store.fetch(3, bench.folder / "fetched")
    load_pieces(folder, targets, together=False)
    # Two additions happened since step 3: one to the adapters at step 4, and one to everything at step 5.
    wrong = sum(
        not torch.allclose(
            targets[name].tensor + (2.0 if name.startswith("adapter") else 1.0),
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


LAB = described(__file__, run)
