"""Control operations between steps: pause, sleep, weight updates, adapters, cache reset.

    pause  -> resume    nothing is scheduled; requests stay where they are
    sleep  -> wake      nor is the device's memory held: refused while requests are under way
    load_weights        from the next step on; a request keeps the keys and values that it has

The loop itself (`loop.Engine`) looks at `paused` and `asleep` before each step.
"""

from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING

from cairn.core.errors import CairnError, ConfigError, RequestError, WeightsError
from cairn.serve.engine.adapters import LoadedAdapter
from cairn.serve.engine.failure import described
from cairn.serve.engine.media import WaitingForRows
from cairn.serve.engine.request import Request, RequestId
from cairn.serve.engine.runner import Runner
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.weight_sources import WeightsFrom, identity_of

if TYPE_CHECKING:
    from cairn.serve.tiers.page_tiers import PageTiers


class Controls(ABC):
    """The part of an engine that its owner calls between steps."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, media: WaitingForRows | None = None
    ) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.media = media  # where requests with pictures wait for their rows
        self.tiers: PageTiers | None = None  # of the cache, beyond the device
        self.paused = False  # no further step is scheduled
        self.asleep = False  # the device's memory was given back: no step is scheduled, either
        self.version = 0  # of the weights; 0: those that the engine was started with
        self.weights_identity = b""  # goes before the identity of every request
        self._loads = Counter[int]()  # by version: a trainer that went back gives a number again

    @abstractmethod
    def abort(self, id: RequestId) -> Request | None:
        """End a request at once."""

    @abstractmethod
    def land_last(self) -> object:
        """Take in what is still in flight."""

    def pause(self, keep: bool = True) -> list[Request]:
        """Schedule nothing until `resume`. Requests stay where they are, or are aborted and returned."""
        self.paused = True
        aborted = [] if keep else [self.abort(id) for id in self.request_ids()]
        return [request for request in aborted if request is not None]

    def request_ids(self) -> list[RequestId]:
        """Ids of all requests, including those that wait for image embeddings."""
        waiting = [request.id for request in self.media.waiting] if self.media else []
        return [*waiting, *self.scheduler.requests]

    def resume(self) -> None:
        self.wake()
        self.paused = False

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the device back until `wake`; what was cached is lost. A CairnError: it goes on.

        At level 2 the weights are dropped as well, and read again by `wake`.
        """
        if self.asleep:
            return
        if running := len(self._requests()):
            raise RequestError(
                f"{running} requests are under way, and would lose their pages",
                hint="wait for their end, or abort them (mode=abort)",
            )
        self.check_sleep(level)
        self.land_last()  # of requests that have ended
        self.scheduler.blocks.reset()  # tiers beyond the device keep what they have
        if self.tiers is not None:
            self.tiers.settle()
        self.runner.sleep(level)
        self.asleep = True

    def check_sleep(self, level: int = 1) -> None:
        """A CairnError: this engine cannot sleep at this level. Changes nothing."""
        if not self.asleep:
            self.runner.check_sleep(level)

    def wake(self) -> None:
        """Wake up; a paused engine stays paused. After a CairnError it still sleeps."""
        if self.asleep:
            self.runner.wake()
            self.asleep = False

    def load_weights(self, version: int, source: WeightsFrom) -> None:
        """Serve with other weights from the next step on. A CairnError: the old ones go on serving.

        Requests under way go on with the keys and values that they have. Pages of another version are never found.
        """
        self.wake()
        if version < 1:
            raise RequestError(f"version is {version}", hint="versions are counted from 1")
        if self.media is not None:
            raise ConfigError(
                "this model sees, and its tower cannot be replaced while it runs",
                hint="start another engine with the new weights",
            )
        self.runner.load_weights(version, source)
        self.weights_changed(version, self._loads[version])
        self._loads[version] += 1

    def _requests(self) -> list[Request]:
        """Requests under way, those whose pictures wait for rows included."""
        return [*self.scheduler.requests.values(), *(self.media.waiting if self.media else ())]

    def weights_changed(self, version: int, loaded_before: int = 0) -> None:
        """The weights were overwritten in place; pages of another version are never found.

        `loaded_before`: as `identity_of` takes it; 0 where the same number always means the same weights.
        """
        before, self.weights_identity = self.weights_identity, identity_of(version, loaded_before)
        self.scheduler.queues.rename_waiting(before, self.weights_identity)
        self.version = version
        if (events := self.scheduler.blocks.prefix.events) is not None:
            events.cleared()
        if self.tiers is not None:
            self.tiers.weights_changed(self.weights_identity)

    def read_adapter(self, folder: str) -> LoadedAdapter:
        """Any thread may call it; a CairnError says what is wrong with the folder."""
        self._check_awake()
        try:
            return self.runner.adapters.read(folder)
        except CairnError:
            raise
        except Exception as problem:  # whatever is in the folder, all other requests go on
            raise WeightsError(
                f"the adapter in {folder} cannot be read: {described(problem)}",
                hint="is its adapter_config.json as PEFT has written it?",
            ) from problem

    def load_adapter(self, number: int, adapter: LoadedAdapter) -> None:
        """Register an adapter, so that requests may use its number."""
        self._check_awake()
        self.runner.adapters.add(number, adapter)

    def unload_adapter(self, number: int) -> None:
        """Requests that have it go on; no other may come."""
        self.runner.adapters.retire(number, self._requests())

    def _check_awake(self) -> None:
        if self.asleep:
            raise ConfigError(
                "the engine sleeps, and an adapter is read beside its weights",
                hint="wake it first (POST /wake_up, LLM.wake_up)",
            )

    def reset_prefix_cache(self) -> None:
        """Forget every prefix, in tiers beyond the device, too; refused while pages are in use."""
        self.scheduler.blocks.reset()
        if self.tiers is not None:
            self.tiers.clear()
