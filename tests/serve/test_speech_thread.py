"""A transcriber's thread without a model: a sound that nobody waits for any more is not heard to its end."""

import queue
import threading
from types import SimpleNamespace

import numpy as np
import torch

from cairn.models.speech.mel import SAMPLES
from cairn.models.speech.transcribe import WindowOptions
from cairn.serve.answer import Answer
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.job import Job
from cairn.serve.speech_thread import Speech, SpeechThread

PARAMS = SamplingParams(max_tokens=1, temperature=0, pooling="last")
WAIT_S = 30.0


class Slow:
    """Hears silence, one batch whenever it is let go on."""

    device, passes = torch.device("cpu"), 0
    model = SimpleNamespace(spec=SimpleNamespace(context=448))

    def __init__(self):
        self.begun, self.go_on, self.heard = threading.Event(), threading.Event(), 0

    def transcribe(self, given):
        self.begun.set()
        assert self.go_on.wait(WAIT_S)
        self.heard += len(given)
        decoded = SimpleNamespace(tokens=[], no_speech=1.0, mean_logprob=-9.0)
        return [SimpleNamespace(decoded=decoded, language="en") for _ in given]


def job_of(id, windows, told):
    speech = Speech(np.zeros(windows * SAMPLES, np.float32), WindowOptions("transcribe", "en"))
    request = Request(id, [0], PARAMS, media=speech)
    return Job(request, Answer(0, PARAMS, None), 1, told.put, streamed=False)


def test_a_sound_that_is_aborted_ends_behind_the_window_that_is_heard():
    slow, told = Slow(), queue.SimpleQueue()
    engine = SpeechThread(slow, rows=1)
    try:
        long, short = job_of(1, 9, told), job_of(2, 1, told)
        engine.submit([long, short])
        assert slow.begun.wait(WAIT_S)
        engine.abort([1])
        slow.go_on.set()
        while not (long.answer.finished and short.answer.finished):
            told.get(timeout=WAIT_S)
        assert long.answer.whole.finish_reason == "abort"
        assert short.answer.whole.finish_reason == "stop"
        assert slow.heard == 2  # of ten windows
        assert not engine.stats().running
    finally:
        engine.close()
