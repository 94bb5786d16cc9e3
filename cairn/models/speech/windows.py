"""Long sound in windows of at most 30 seconds, cut where it is quiet.

    |---- window 0 ----|~quiet~|---- window 1 ----|~quiet~|-- window 2 --|

A cut is the middle of the quietest tenth of a second in the last third of a window, and each window keeps the place
where it begins: times are true, however many windows lie before. No torch.
"""

from typing import Any, NamedTuple

import numpy as np

from cairn.models.speech.mel import RATE, SAMPLES

QUIET = RATE // 10  # samples
LEAST = SAMPLES * 2 // 3  # of a window that is cut
SILENCE = 1e-4  # the loudest sample of a window of silence
Samples = np.ndarray[Any, np.dtype[np.float32]]


class AudioWindow(NamedTuple):
    start: int  # samples from the beginning
    samples: Samples

    @property
    def start_s(self) -> float:
        return self.start / RATE

    @property
    def length_s(self) -> float:
        return len(self.samples) / RATE

    @property
    def is_silent(self) -> bool:
        return not len(self.samples) or float(np.abs(self.samples).max()) < SILENCE


def windows(samples: Samples) -> list[AudioWindow]:
    """All of the sound, in order and without overlap."""
    cut, start = [], 0
    while len(samples) - start > SAMPLES:
        end = start + _cut(samples[start : start + SAMPLES])
        cut.append(AudioWindow(start, samples[start:end]))
        start = end
    cut.append(AudioWindow(start, samples[start:]))
    return cut


def _cut(window: Samples) -> int:
    """End of a window: the quietest point in its last third."""
    loud = np.square(window[LEAST:].astype(np.float64))
    sums = np.concatenate(([0.0], np.cumsum(loud)))
    energy = sums[QUIET:] - sums[:-QUIET]
    # The last of equally quiet places: windows should not be shorter than they have to be.
    quietest = len(energy) - 1 - int(np.argmin(energy[::-1]))
    return LEAST + quietest + QUIET // 2
