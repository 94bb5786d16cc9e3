"""Gradients in buckets: when all of a bucket are ready, during backward, it is sent on its way.

    backward ->  [norm head layer11] [layer10 layer9] ...      the last layers' gradients are ready first
                  launch              launch                    in the same order on every rank

What sending means (all-reduce, reduce-scatter) is the caller's business; so is waiting. Gradients are held by
`gradients`, which adds those of 16 bits in float32.
"""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

BYTES = 32 << 20


class Buckets:
    """Calls `launch(bucket)` once for each bucket of a pass, in order, as soon as its gradients are there."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        launch: Callable[[list[str]], None],
        most_bytes: int = BYTES,
    ) -> None:
        self.launch = launch
        self.buckets = list(fill(parameters, most_bytes))
        self.armed = False
        self._missing: list[int] = []
        self._next = 0
        for number, bucket in enumerate(self.buckets):
            for name in bucket:
                parameters[name].register_post_accumulate_grad_hook(self._hook(number))

    def arm(self) -> None:
        """The backward that comes completes the gradients."""
        self.armed, self._next = True, 0
        self._missing = [len(bucket) for bucket in self.buckets]

    def flush(self) -> None:
        """Launches what is left: parameters that got no gradient, or were not watched."""
        if not self.armed:
            self._next = 0
        self.armed = False
        while self._next < len(self.buckets):
            self._launch_next()

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if not self.armed:
                return
            self._missing[number] -= 1
            while self._next < len(self.buckets) and self._missing[self._next] <= 0:
                self._launch_next()

        return ready

    def _launch_next(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        self.launch(bucket)


def fill(parameters: Mapping[str, nn.Parameter], most_bytes: int) -> Iterator[list[str]]:
    """Names in reverse order, which is about the order in which backward finishes; one type in each bucket."""
    bucket: list[str] = []
    size, dtype = 0, None
    for name, parameter in reversed(list(parameters.items())):
        if bucket and (size + parameter.nbytes > most_bytes or parameter.dtype != dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size, dtype = size + parameter.nbytes, parameter.dtype
    if bucket:
        yield bucket
