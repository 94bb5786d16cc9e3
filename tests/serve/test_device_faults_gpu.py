"""A real error of the device, which every later call of the process meets again: the process is replaced."""

import subprocess
import sys

import pytest
from client_stream import submit

from cairn.serve.config import EngineConfig
from cairn.serve.engine.client import EngineClient, ProcessOptions
from cairn.serve.engine.messages import Boot, EngineFailed
from cairn.serve.engine.process import spawn_worker
from cairn.serve.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
# The third step reads beyond the end of a tensor, once: the kernel's assertion fails, and with it the CUDA context.
FAULTY = """
import pathlib
import sys
import torch
from cairn.serve.engine import worker
from cairn.serve.engine.loop import Engine

fired = pathlib.Path(sys.argv[1])

def asserting(engine, step=Engine.step):
    if engine.steps == 3 and not fired.exists():
        fired.touch()
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
    return step(engine)

Engine.step = asserting
sys.exit(worker.main())
"""
PROMPT = [5, 9, 100, 7]
SHORT = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=240)


def test_a_device_assert_replaces_the_process_of_the_engine(tmp_path):
    """A fresh interpreter is started each time: a process forked from one that has a CUDA context cannot use it."""
    fired = tmp_path / "fired"

    def spawn(boot: Boot) -> "subprocess.Popen[bytes]":
        return spawn_worker(boot, (sys.executable, "-P", "-c", FAULTY, str(fired)))

    config = EngineConfig(
        model="random:tiny-llama", device="cuda", num_gpu_blocks_override=64, max_num_seqs=8
    )
    with EngineClient(config, ProcessOptions(beat_s=0.1, restarts=1), spawn=spawn) as client:
        stream = submit(client, PROMPT, LONG)
        with pytest.raises(EngineFailed, match="device-side assert"):
            for _ in stream:
                pass
        assert client.restarting is not None
        answers = []
        for _ in range(
            2
        ):  # the new process goes on; what is computed does not depend on what was before
            deltas = submit(client, PROMPT, SHORT)
            answers.append([token for delta in deltas for token in delta.tokens])
        assert (client.restarted, client.alive, client.restarting) == (1, True, None)
    assert answers[0] == answers[1]
    assert len(answers[0]) == SHORT.max_tokens
