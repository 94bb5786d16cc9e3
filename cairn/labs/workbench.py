"""What a lab can use while it runs: this machine's ceilings, a clock, a progress bar, a folder.

    bench.device     where torch computes here: "cuda:0" or "cpu"
    bench.ceilings   the measured limits of this machine (machine.json)
    bench.quick      a shorter look, for CI and the impatient: smaller sizes, fewer repeats
    bench.step(...)  "this is what happens now", for the bar
    bench.time(...)  the median of repeated calls, with its spread
    bench.folder     an empty folder that is gone afterwards
    bench.setting()  a size that the learner may have set: --set n=512
    bench.size(...)  one that the lab's question names, as the learner set it or as this form has it

Loading or measuring the ceilings is the caller's business.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cairn.hw.ceilings import Ceilings
from cairn.hw.timing import CallTiming, measure
from cairn.labs.lab import Size

Choice = TypeVar("Choice")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Workbench:
    ceilings: Ceilings
    quick: bool
    folder: Path
    report: Callable[[str], None] = lambda label: None
    settings: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, Size] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return self.ceilings.device

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def step(self, label: str) -> None:
        """Shown beside the bar; never drawn while something is timed."""
        self.report(label)

    def pick(self, full: Choice, quick: Choice) -> Choice:
        """The full size of something, or its quick one."""
        return quick if self.quick else full

    def setting(self, name: str, default: Number) -> Number:
        """What the learner set, as a number of the same type, or the lab's own value."""
        return type(default)(self.settings.get(name, default))

    def size(self, name: str) -> Any:
        """Of `sizes` in the lab's TOML file, from which the question is filled in as well."""
        size = self.sizes[name]
        return self.setting(name, self.pick(size.full, size.quick))

    def time(
        self,
        call: Callable[..., object],
        inputs: Sequence[tuple[Any, ...]] = ((),),
        *,
        budget_ms: float = 200.0,
        device: str | None = None,
        at_least: int = 5,
    ) -> CallTiming:
        """Time of one call on this machine's device; a quarter of the budget when quick."""
        return measure(
            call,
            inputs,
            device=self.device if device is None else device,
            budget_ms=self.pick(budget_ms, budget_ms / 4),
            at_least=self.pick(at_least, 3),
        )
