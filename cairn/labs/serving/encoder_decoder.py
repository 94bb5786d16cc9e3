"""An encoder-decoder writes an answer: what does looking at the source cost in each step, and what if it is forgotten?

    source [S] -encoder-> keys and values of every decoder layer, once: slots of a fixed size
    answer [t] -decoder-> its own keys and values grow by one row for each token

The real T5 writes; hooks count the bytes of keys and values that every step reads, and torch counts the products with
weights (those of attention are counted on some devices only).
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench
from cairn.models.text_to_text.spec import T5Spec

if TYPE_CHECKING:
    import torch

    from cairn.models.text_to_text.model import T5

SPEC = T5Spec(
    vocab=512,
    hidden=128,
    heads=4,
    head_dim=32,
    intermediate=256,
    encoder_layers=2,
    decoder_layers=2,
    buckets=32,
    farthest=128,
    activation="relu",
    gated=False,
    norm_eps=1e-6,
    scaled=True,
    start_id=0,
    eos_ids=(1,),
)
SOURCES = (16, 64, 256)
ANSWER = 64
FLOAT_BYTES = 4


class Read(NamedTuple):
    """Bytes of keys and values that one step reads."""

    source: int
    answer: int


class Run(NamedTuple):
    steps: list[Read]
    flops: int  # of the products with weights in the last step
    logits_TV: "torch.Tensor"


def made() -> "T5":
    import torch

    from cairn.models.text_to_text.model import T5

    model = T5(SPEC)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.05, generator=draw)
    return model.requires_grad_(False)


def written(model: "T5", length: int, remembers: bool) -> Run:
    """An answer to a source of so many tokens; without memory its keys are computed anew in every step."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from cairn.models.text_to_text.model import DecodedTokens

    source_S, answer_T = texts(length)
    memory_SD = model.encode(source_S)
    memory, kept, steps, logits = None, DecodedTokens(), [], []
    counter = FlopCounterMode(display=False)
    with counting(model) as read:
        for number, token in enumerate(answer_T.tolist()):
            read.clear()
            with counter if number == ANSWER - 1 else nullcontext():
                if memory is None or not remembers:
                    memory = model.keys_of(memory_SD)
                logits.append(model.read(torch.tensor([token]), kept, memory))
            steps.append(Read(read["look"], read["attention"]))
    counted = counter.get_flop_counts()["Global"]
    return Run(steps, counted[torch.ops.aten.mm], torch.cat(logits))


def texts(length: int) -> tuple["torch.Tensor", "torch.Tensor"]:
    """A source of so many tokens and an answer, drawn."""
    import torch

    draw = torch.Generator().manual_seed(length)
    source_S = torch.randint(2, SPEC.vocab, (length,), generator=draw)
    return source_S, torch.randint(2, SPEC.vocab, (ANSWER,), generator=draw)


def apart(model: "T5", length: int, logits_TV: "torch.Tensor") -> float:
    """The largest difference of a logit to an answer that is read in one pass."""
    from cairn.models.text_to_text.model import DecodedTokens

    source_S, answer_T = texts(length)
    whole_TV = model.read(answer_T, DecodedTokens(), model.remember(source_S))
    return float((whole_TV - logits_TV).abs().max())


class counting:
    """Bytes of the keys and values that the decoder's attentions are given, by their kind."""

    def __init__(self, model: "T5") -> None:
        self.model, self.read = model, dict.fromkeys(("look", "attention"), 0)

    def __enter__(self) -> dict[str, int]:
        self.hooks = [
            getattr(block, kind).register_forward_pre_hook(self._counter(kind))
            for block in self.model.decoder
            for kind in ("look", "attention")
        ]
        self.read.clear()
        return self.read

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _counter(self, kind: str):  # noqa: ANN202 (a hook of torch's)
        def count(_: object, arguments: tuple[object, tuple["torch.Tensor", ...], object]) -> None:
            self.read[kind] = self.read.get(kind, 0) + sum(part.nbytes for part in arguments[1])

        return count


def bytes_of(tokens: int) -> int:
    """Keys and values of so many tokens, of all layers of the decoder."""
    return 2 * SPEC.decoder_layers * SPEC.heads * SPEC.head_dim * tokens * FLOAT_BYTES


def step_flops(source: int) -> int:
    """Of the products with weights in one step, the keys and values of so many tokens of the source among them."""
    width = SPEC.heads * SPEC.head_dim
    layer = 2 * SPEC.hidden * (6 * width + 2 * SPEC.intermediate)  # q k v o, q o, up and down
    again = 2 * SPEC.hidden * 2 * width * source
    return SPEC.decoder_layers * (layer + again) + 2 * SPEC.hidden * SPEC.vocab


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    model, rows = made(), []
    once: dict[int, Run] = {}
    again: dict[int, Run] = {}
    with torch.inference_mode():
        for length in SOURCES:
            bench.step(f"a source of {length} tokens")
            once[length], again[length] = (written(model, length, way) for way in (True, False))
            last = once[length].steps[-1]
            ratio = again[length].flops / once[length].flops
            rows.append([length, last.source, last.answer, ratio])
        far = apart(model, SOURCES[-1], once[SOURCES[-1]].logits_TV)
    lines = {
        f"source, {length} tokens": [
            (float(t + 1), float(s.source)) for t, s in enumerate(own.steps)
        ]
        for length, own in once.items()
    }
    lines["answer"] = [(float(t + 1), float(s.answer)) for t, s in enumerate(once[64].steps)]
    return Outcome(
        checks=_checks(once, again, far),
        plots=[
            Plot(
                title=Words("Keys and values that a step reads", "每一步读取的 key 与 value"),
                x=Words("tokens of the answer", "答案 token 数"),
                y=Words("bytes", "字节"),
                lines=lines,
            )
        ],
        table=Table(
            columns=[
                Words("tokens of the source", "源文本 token 数"),
                Words("bytes of its keys and values", "源 KV 字节"),
                Words("bytes of the answer's, at its end", "答案末尾 KV 字节"),
                Words("products of a step without memory, x", "不缓存时一步的乘法，倍"),
            ],
            rows=rows,
        ),
    )


def _checks(once: dict[int, Run], again: dict[int, Run], far: float) -> list[Check]:
    longest = SOURCES[-1]
    steps = once[longest].steps
    return [
        Check(
            what=Words(
                "keys and values of the source, read in the last step", "最后一步读取的源 KV"
            ),
            predicted=bytes_of(longest),
            measured=steps[-1].source,
            unit="bytes",
        ),
        Check(
            what=Words(
                "keys and values of the answer, read in the last step", "最后一步读取的答案 KV"
            ),
            predicted=bytes_of(ANSWER),
            measured=steps[-1].answer,
            unit="bytes",
        ),
        Check(
            what=Words("products with weights in a step", "一步中与权重的乘法"),
            predicted=step_flops(0),
            measured=once[longest].flops,
            unit="FLOPs",
        ),
        Check(
            what=Words(
                "products of a step that computes the source's keys anew over one that reads them",
                "重算源 KV 的一步与读取的一步的乘法之比",
            ),
            predicted=step_flops(longest) / step_flops(0),
            measured=again[longest].flops / once[longest].flops,
            unit="x",
            within=1e-9,
        ),
        Check(
            what=Words(
                "largest difference of a logit, token by token or all at once",
                "逐 token 与一次读完的 logit 最大差异",
            ),
            predicted=1e-4,
            measured=far,
            unit="",
            kind="at_most",
        ),
    ]


LAB = described(__file__, run)
