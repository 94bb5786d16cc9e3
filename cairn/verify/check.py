"""Verdict on evidence: comparison with the plain path, then tests of the hypotheses.

texts   agree --> fine
        differ --> which change of the spec, of the prompt or of the weights explains it?
chat    the model is known by now: what still differs is the template
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from cairn.models.spec import ModelSpec
from cairn.models.tokenizer import Tokenizer
from cairn.verify.agreement import LogprobAgreement, agreement
from cairn.verify.chat_templates import of_template
from cairn.verify.evidence import ModelEvidence, Observation
from cairn.verify.explain import (
    LEVELS,
    SAME,
    HypothesisFit,
    Level,
    best,
    fit,
    level_of,
    mean_distance,
    within,
)
from cairn.verify.hypotheses import (
    EIGHT_BIT_PRODUCTS,
    Hypothesis,
    of_places,
    of_prompt,
    of_spec,
    of_weights,
)
from cairn.verify.plain_path import PlainPath
from cairn.verify.probes import CHAT_PROBE, LONG

Watch = Callable[[str], None]
Status = Literal["agrees", "differs"]
PLACES = 32  # of a text, on which a hypothesis is tried first
# Explained there: the right cause brings what is expected closer, never further away.
UNLIKELY = -0.5
CLEAR = 0.9  # explained of a whole text, after which no other cause is looked for
SIZES = Hypothesis("rounding", "computed in bfloat16", "weights", bits="bfloat16")


class VerifyFinding(msgspec.Struct, frozen=True):
    name: str  # the cause, such as "norm epsilon"
    says: str
    explained: float  # share of the difference


class ProbePart(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one type of probe: texts or chat."""

    part: str
    places: int
    top1: float
    kl: float
    largest_kl: float
    distance: float
    level: Level | None  # the least rounding that makes a difference of this size
    finding: VerifyFinding | None = None


class VerifyVerdict(msgspec.Struct, frozen=True, kw_only=True):
    status: Status
    says: str
    expected: Level
    parts: list[ProbePart]
    tried: int  # hypotheses that were computed

    @property
    def findings(self) -> list[VerifyFinding]:
        return [part.finding for part in self.parts if part.finding is not None]


class ModelCheck:
    """Check of a model against evidence."""

    def __init__(
        self,
        path: PlainPath,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        watch: Watch = lambda said: None,
    ) -> None:
        self.path, self.spec, self.tokenizer, self.watch = path, spec, tokenizer, watch
        self._known: dict[tuple[str, int, str], Observation] = {}  # by probe, length and hypothesis
        self._sizes: dict[Level, float] = {}

    def verdict(self, evidence: ModelEvidence, expected: Level) -> VerifyVerdict:
        seen = [one for one in evidence.observations if any(one.rows)]
        texts = [one for one in seen if one.probe != CHAT_PROBE]
        chat = [one for one in seen if one.probe == CHAT_PROBE]
        parts: list[ProbePart] = []
        cause: Hypothesis | None = None
        if texts:
            part, cause = self._texts(texts, expected)
            parts.append(part)
        if chat:
            parts.append(self._chat(chat, parts[0] if parts else None, cause, expected))
        return _judged(parts, expected, self.tried)

    # -- texts -----------------------------------------------------------------------------------

    def _texts(
        self, texts: list[Observation], expected: Level
    ) -> tuple[ProbePart, Hypothesis | None]:
        self.watch(f"the plain path computes {len(texts)} texts in float32")
        plain = self.path.expected(texts)
        distance = mean_distance(texts, plain)
        agreed = agreement(texts, plain)
        if distance <= SAME:
            return _part("texts", agreed, distance, "float32", None), None
        sizes = self._measure_sizes(texts, plain, expected)
        found = self._named(texts, plain, self._about_texts())
        level = level_of(distance, sizes)
        finding = None if found is None else _finding(found)
        if finding is None and not within(level, expected):
            finding = self._unexplained(level, expected)
        cause = None if found is None else found.hypothesis
        return _part("texts", agreed, distance, level, finding), cause

    def _about_texts(self) -> list[Hypothesis]:
        hypotheses = [*of_spec(self.spec), *of_places(self.spec)]
        if self.tokenizer is not None:
            bos = self.tokenizer.bos_id
            starts = bos is not None and self.tokenizer.encode("a")[:1] == [bos]
            hypotheses += of_prompt(bos, starts)
        return hypotheses + list(of_weights())

    def _measure_sizes(
        self, texts: list[Observation], plain: list[Observation], expected: Level
    ) -> dict[Level, float]:
        """Distance of each rounding from the plain path on the first text.

        Weights that a file has in few bits are often multiplied with activations in 8 bits, which is the larger error.
        """
        first, base = texts[:1], plain[:1]
        for one in (SIZES, *of_weights()):
            level: Level = one.bits or "bfloat16"
            size = self._fit(one, first, base).size
            self._sizes[level] = max(size, self._sizes.get(level, 0.0))
        if expected in ("int8", "int4"):
            both = self._fit(EIGHT_BIT_PRODUCTS, first, base).size
            self._sizes["int8"] = max(self._sizes["int8"], both)
        self._sizes["int8"] = max(self._sizes["int8"], self._sizes["bfloat16"])
        self._sizes["int4"] = max(self._sizes["int4"], self._sizes["int8"])
        return self._sizes

    def _named(
        self,
        texts: list[Observation],
        plain: list[Observation],
        hypotheses: Sequence[Hypothesis],
    ) -> HypothesisFit | None:
        """The likeliest are tried on one text until one is clear; the best then has to explain all texts."""
        fits = []
        for one, at in self._likeliest(texts, plain, hypotheses):
            fits.append(self._fit(one, texts[at : at + 1], plain[at : at + 1]))
            if fits[-1].named and fits[-1].explained > CLEAR:
                break
        for candidate in sorted((f for f in fits if f.likely), key=lambda f: -f.explained)[:2]:
            if candidate.hypothesis.probe and candidate.named:
                return candidate  # it changes no other text
            whole = self._fit(candidate.hypothesis, texts, plain)
            if whole.named:
                return whole
        return None

    def _likeliest(
        self,
        texts: list[Observation],
        plain: list[Observation],
        hypotheses: Sequence[Hypothesis],
    ) -> list[tuple[Hypothesis, int]]:
        """Each with the text that it is tried on, best first, without those that the start of it speaks against."""
        found: list[tuple[float, Hypothesis, int]] = []
        for one in hypotheses:
            at = _screened(texts, one)
            if at is None:
                continue
            # Rounded weights were computed when sizes were measured, and a long text is scored at its end alone.
            whole = one.bits is not None or bool(one.probe)
            start = [texts[at] if whole else _start(texts[at])]
            known = [plain[at] if whole else _start(plain[at])]
            found.append((self._fit(one, start, known).explained, one, at))
        found.sort(key=lambda entry: -entry[0])
        return [(one, at) for explained, one, at in found if explained > UNLIKELY]

    def _fit(
        self, one: Hypothesis, observed: list[Observation], plain: list[Observation]
    ) -> HypothesisFit:
        return fit(one, observed, plain, self._expected(observed, one))

    def _unexplained(self, level: Level | None, expected: Level) -> VerifyFinding:
        if level is not None:
            says = f"as far off as {_weights_of(level)} make it, where {_weights_of(expected)} were expected; "
            says += f"it may be something else, which none of {self.tried} causes explains"
            return VerifyFinding("quantisation", says, 0.0)
        return VerifyFinding(
            "unknown",
            f"further off than 4-bit weights, and none of {self.tried} causes explains it; "
            "these may be other weights",
            0.0,
        )

    # -- chat ------------------------------------------------------------------------------------

    def _chat(
        self,
        chat: list[Observation],
        texts: ProbePart | None,
        cause: Hypothesis | None,
        expected: Level,
    ) -> ProbePart:
        """`cause`: what the texts have named already, which holds here, too."""
        alone, texts_agree = texts is None, texts is not None and texts.finding is None
        known = cause if cause is not None and cause.concern in ("spec", "weights") else None
        plain = self.path.expected(chat, known)
        distance = mean_distance(chat, plain)
        agreed = agreement(chat, plain)
        # Few places, so one of them may be ten times the mean; another template is further off by far.
        if distance <= (SAME if alone else 10 * SAME):
            return _part("chat", agreed, distance, "float32", None)
        if not self._sizes:
            self._measure_sizes(chat, plain, expected)
        level = level_of(distance, self._sizes)
        allowed = expected if known is None else known.bits or expected
        if within(level, allowed) and not alone:
            return _part("chat", agreed, distance, level, None)
        hypotheses = [] if self.tokenizer is None else list(of_template(self.tokenizer))
        if alone:
            hypotheses += [one for one in self._about_texts() if not one.probe]
        found = best([self._fit(one, chat, plain) for one in hypotheses])
        finding = None if found is None else _finding(found)
        if finding is None and not within(level, expected):
            finding = self._unexplained(level, expected)
            if texts is not None and texts.finding is not None and not texts.finding.explained:
                finding = texts.finding  # what the texts do not explain is said once
            elif texts_agree:
                says = "the texts agree and the chat does not: a template that is not known here"
                finding = VerifyFinding("chat template", says, 0.0)
        return _part("chat", agreed, distance, level, finding)

    def _expected(
        self, observed: Iterable[Observation], hypothesis: Hypothesis
    ) -> list[Observation]:
        """Under a hypothesis; each text is computed once."""
        return [self._computed(one, hypothesis) for one in observed]

    def _computed(self, observed: Observation, hypothesis: Hypothesis) -> Observation:
        key = (observed.probe, len(observed.ids), hypothesis.says)
        if key not in self._known:
            self.watch(f"trying cause {self.tried + 1}: {hypothesis.says}")
            [self._known[key]] = self.path.expected([observed], hypothesis)
        return self._known[key]

    @property
    def tried(self) -> int:
        """Number of hypotheses that were computed."""
        return len({says for _, _, says in self._known})


def _start(one: Observation) -> Observation:
    """The same observation, up to its first scored places."""
    return Observation(one.probe, one.ids[: one.first + PLACES], one.first, one.rows[:PLACES])


def _screened(texts: list[Observation], hypothesis: Hypothesis) -> int | None:
    """The text on which a hypothesis is tested: the one it affects, or the first short one."""
    for at, one in enumerate(texts):
        if one.probe == hypothesis.probe or (not hypothesis.probe and one.probe != LONG):
            return at
    return None


def _part(
    name: str,
    agreed: LogprobAgreement,
    distance: float,
    level: Level | None,
    finding: VerifyFinding | None,
) -> ProbePart:
    return ProbePart(
        part=name,
        places=agreed.places,
        top1=agreed.top1,
        kl=agreed.kl,
        largest_kl=agreed.largest_kl,
        distance=distance,
        level=level,
        finding=finding,
    )


def _finding(found: HypothesisFit) -> VerifyFinding:
    says = found.hypothesis.says
    if found.hypothesis.concern == "template" and found.explained < CLEAR:
        says = f"not one that is known here; the closest is: {says}"
    return VerifyFinding(found.hypothesis.name, says, found.explained)


def _weights_of(level: Level) -> str:
    return {
        "float32": "float32 sums",
        "bfloat16": "bfloat16 products",
        "int8": "8-bit weights or activations",
        "int4": "4-bit weights",
    }[level]


def _judged(parts: list[ProbePart], expected: Level, tried: int) -> VerifyVerdict:
    findings = [part.finding for part in parts if part.finding is not None]
    allowed = [one for one in findings if not _is_expected(one, expected)]
    if not parts:
        says = "nothing was observed: the source gave no log-probabilities"
        return VerifyVerdict(status="differs", says=says, expected=expected, parts=[], tried=tried)
    if allowed:
        says = "; ".join(dict.fromkeys(f"{one.name}: {one.says}" for one in allowed))
        return VerifyVerdict(
            status="differs", says=says, expected=expected, parts=parts, tried=tried
        )
    levels = [part.level for part in parts if part.level is not None]
    worst: Level = max(levels, key=_rank) if levels else "float32"
    says = f"it computes this model; what differs is rounding, {_weights_of(worst)} at most"
    return VerifyVerdict(status="agrees", says=says, expected=expected, parts=parts, tried=tried)


def _is_expected(finding: VerifyFinding, expected: Level) -> bool:
    """A rounding that the caller allowed is no difference."""
    eight = "8 bits" in finding.says
    return (
        finding.name == "quantisation"
        and finding.explained > 0
        and (expected == "int4" or (expected == "int8" and eight))
    )


def _rank(level: Level) -> int:
    return LEVELS.index(level)
