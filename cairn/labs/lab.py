"""What a lab is: a hypothesis, a prediction from this machine's ceilings, a measurement, a verdict.

    Lab ──run(bench)──> Outcome ──judge──> Verdict
    hypothesis          checks: predicted beside measured      "as predicted within 7%"
    code, reading       plots, a table, notes                  or the gap and its two likeliest causes
    three questions     ceilings that it measured on the way

A lab is two small files: `cairn/labs/AREA/NAME.py` runs it and ends with `LAB = described(__file__, run)`;
`NAME.toml` beside it says what it is about. Everything a person reads exists in English and in Simplified Chinese
(`Words`). Only data and the judgement here: no clock, no torch, no terminal. A lab's file imports torch inside its
functions, so that listing all labs stays quick.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from cairn.hw.ceilings import Measured
    from cairn.labs.workbench import Workbench

Language = Literal["en", "zh"]
Need = Literal[
    "gpu",
    "2 processes",
    "2 cores",
    "root",
    "linux",
    "triton",
    "nixl",
    "compiler",
    "go",
    "gpu or compiler",
]
Kind = Literal["near", "at_least", "at_most"]
Points = Sequence[tuple[float, float]]  # of one line of a plot
Lines = Mapping[str, Points]  # of a plot, by name
Rows = Sequence[Sequence[str | float | int]]  # of a table


class Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One text in both languages."""

    en: str
    zh: str

    def of(self, language: Language) -> str:
        return self.zh if language == "zh" else self.en


AREAS: dict[str, Words] = {
    "gpu": Words("GPU and kernels", "GPU 与算子"),
    "pytorch": Words("PyTorch's execution model", "PyTorch 执行模型"),
    "comm": Words("Collectives and networking", "集合通信与网络"),
    "training": Words("Distributed training", "分布式训练"),
    "serving": Words("Serving", "推理服务"),
    "cluster": Words("Cluster and failures", "集群与容错"),
    "linux": Words("Linux", "操作系统"),
    "llm": Words("Language models", "大模型"),
    "projects": Words("Projects", "综合项目"),
}


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ask: Words
    answer: Words


@dataclass(frozen=True, kw_only=True)
class Check:
    """One prediction beside its measurement.

    near      the measurement lies within `within` (a share) of the prediction
    at_least  it reaches the prediction, less that share
    at_most   it stays below the prediction, plus that share
    """

    what: Words
    predicted: float
    measured: float
    unit: str
    kind: Kind = "near"
    within: float = 0.0
    simulated: bool = False  # `measured` comes out of a simulator, not of this machine

    @property
    def gap(self) -> float:
        """How far the measurement lies from the prediction, as a share of it; above 0 is more."""
        if self.predicted == 0:
            return 0.0 if self.measured == 0 else math.copysign(math.inf, self.measured)
        return (self.measured - self.predicted) / abs(self.predicted)

    @property
    def held(self) -> bool:
        if not math.isfinite(self.measured):
            return False
        match self.kind:
            case "near":
                return abs(self.gap) <= self.within
            case "at_least":
                return self.gap >= -self.within
            case "at_most":
                return self.gap <= self.within


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Lines over two axes; a person sees it in the terminal and on the page."""

    title: Words
    x: Words
    y: Words
    lines: Lines
    log_x: bool = False
    log_y: bool = False
    limit: tuple[str, float] | None = None  # a dashed line across: the physical limit


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: Sequence[Words]
    rows: Rows


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a lab found: at least one check, and whatever shows it best."""

    checks: Sequence[Check]
    plots: Sequence[Plot] = ()
    table: Table | None = None
    notes: Sequence[Words] = ()
    # Ceilings of machine.json that were measured on the way, by name: "copy", "matmul.fp32".
    calibrates: "Mapping[str, Measured]" = field(default_factory=dict)


class Knob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size that the learner may set: `cairn lab run roofline --set n=512`."""

    name: str
    what: Words
    least: float = 1  # a lab that draws, steps or measures nothing has nothing to judge
    most: float = 1e9


class Size(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size that the question names: `{tokens}` in its text, `bench.size("tokens")` in the lab."""

    full: int | float
    quick: int | float


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to try next: a command, and what to look for."""

    command: str
    look: Words


@dataclass(frozen=True, kw_only=True)
class Lab:
    name: str
    area: str
    title: Words
    hypothesis: Words
    run: "Callable[[Workbench], Outcome]"
    causes: tuple[Words, Words]  # the likeliest reasons for a gap, the likelier one first
    code: tuple[str, ...]  # what it exercises: "cairn/hw/roofline.py:floor"
    reading: tuple[str, ...]  # papers and manuals by title
    questions: tuple[Question, Question, Question]
    needs: tuple[Need, ...] = ()
    seconds: float = 5.0  # about how long it takes on two cores
    predict: Words | None = None  # what the learner is asked for first: the value of one check
    predict_of: str = ""  # words of that check's name; "" is the first check
    sizes: Mapping[str, Size] = field(default_factory=dict)  # what `predict` has in braces
    why: Words | None = None  # why the result comes out so; shown after it
    knobs: tuple[Knob, ...] = ()
    now_try: tuple[Step, ...] = ()
    simulated: bool = False  # every check's value comes out of a simulator


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What NAME.toml says; the fields of a `Lab` that are text."""

    title: Words
    hypothesis: Words
    causes: tuple[Words, Words]
    code: tuple[str, ...]
    reading: tuple[str, ...]
    questions: tuple[Question, Question, Question]
    needs: tuple[Need, ...] = ()
    seconds: float = 5.0
    predict: Words | None = None
    predict_of: str = ""
    sizes: dict[str, Size] = {}
    why: Words | None = None
    knobs: tuple[Knob, ...] = ()
    now_try: tuple[Step, ...] = ()
    simulated: bool = False  # every check's value comes out of a simulator


def described(file: str, run: "Callable[[Workbench], Outcome]") -> Lab:
    """The lab of this Python file, with the texts of the TOML file beside it."""
    path = Path(file).with_suffix(".toml")
    try:
        text = msgspec.toml.decode(path.read_text(encoding="utf-8"), type=Description)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path.parent.name}/{path.name}: {error}") from error
    name, area = path.stem.replace("_", "-"), path.parent.name
    return Lab(
        name=name, area=area, run=run, **{f: getattr(text, f) for f in text.__struct_fields__}
    )


def question_of(lab: Lab, quick: bool, settings: Mapping[str, float]) -> Words | None:
    """What the learner is asked for first, with the sizes of the form that will run."""
    if lab.predict is None:
        return None
    sizes = {name: size.quick if quick else size.full for name, size in lab.sizes.items()}
    values = {name: f"{settings.get(name, size):g}" for name, size in sizes.items()}
    return Words(lab.predict.en.format(**values), lab.predict.zh.format(**values))


def predicted_check(lab: Lab, checks: Sequence[Check]) -> Check | None:
    """The check that the learner's own number is about; a machine may lack it."""
    return next((check for check in checks if lab.predict_of in check.what.en), None)


@dataclass(frozen=True)
class Verdict:
    held: bool
    worst: Check  # the check that is furthest from what was predicted
    text: Words


def judge(lab: Lab, outcome: Outcome) -> Verdict:
    """The verdict over all checks: held only when each of them is."""
    if not outcome.checks:
        raise ValueError(f"lab {lab.name} measured nothing: an outcome has at least one check")
    broken = [check for check in outcome.checks if not check.held]
    if broken:
        worst = max(broken, key=lambda check: abs(check.gap))
        return Verdict(False, worst, _gap_text(worst, lab.causes))
    worst = max(outcome.checks, key=_distance)
    return Verdict(True, worst, _held_text(outcome.checks))


def _distance(check: Check) -> float:
    """How far a held check is from its prediction, where further means less sure."""
    return abs(check.gap) if check.kind == "near" else 0.0


def _held_text(checks: Sequence[Check]) -> Words:
    near = [abs(check.gap) for check in checks if check.kind == "near"]
    if not near:
        return Words("as predicted: every bound holds", "与预测一致：所有界限都成立")
    if max(near) == 0:
        return Words("exactly as predicted", "与预测完全一致")
    share = f"{max(near):.0%}" if max(near) >= 0.01 else "1%"
    return Words(f"as predicted within {share}", f"与预测一致，误差在 {share} 以内")


def _gap_text(check: Check, causes: tuple[Words, Words]) -> Words:
    gap, (first, second) = gap_of(check), causes
    return Words(
        f"{gap.en}; likeliest: {first.en}; or: {second.en}",
        f"{gap.zh}；最可能的原因：{first.zh}；其次：{second.zh}",
    )


def gap_of(check: Check) -> Words:
    """Which check, and how far it is from its prediction."""
    if not math.isfinite(check.gap):
        return Words(f"{check.what.en}: not a number", f"{check.what.zh}：不是有效数值")
    return Words(
        f"{check.what.en}: {check.gap:+.0%} from predicted",
        f"{check.what.zh}：与预测相差 {check.gap:+.0%}",
    )
