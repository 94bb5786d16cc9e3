"""Engines that break, hang or do not come back: found in time, and nobody waits for them without limit."""

import subprocess
import threading
import time

import msgspec
import pytest
import torch
from client_stream import submit
from forked_workers import ForkedProcess
from test_engine_process import (
    CONFIG,
    GREEDY,
    LONG,
    PROMPT,
    at_step,
    begun,
    hang_here,
    read,
    running,
)
from tiny_engines import greedy, prompt_of, tiny_engine
from tiny_engines import submit as submit_to

from cairn.core.errors import CairnError, ConfigError, WeightsError
from cairn.serve.engine import process
from cairn.serve.engine.client import EngineClient, ProcessOptions
from cairn.serve.engine.controls import Controls
from cairn.serve.engine.cuda_graph import Graphs
from cairn.serve.engine.failure import MOST_FAILED_STEPS, is_fatal
from cairn.serve.engine.messages import EngineFailed
from cairn.serve.engine.request import Limits
from cairn.serve.engine.start import start
from cairn.serve.engine_thread import EngineThread
from cairn.serve.job_thread import JobThread

PATIENCE_S = 60.0


def wait_until(true):
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


# -- which errors end an engine ------------------------------------------------------------------


def caused(problem, cause):
    problem.__cause__ = cause
    return problem


ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")
NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("problem", "fatal"),
    [
        (ILLEGAL, True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3356"), True),
        (caused(WeightsError("the adapter cannot be read"), ILLEGAL), True),
        (NO_ROOM, False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), False),
        (caused(WeightsError("the adapter cannot be read"), NO_ROOM), False),
        (KeyError("CUDA error"), False),
    ],
)
def test_errors_of_a_lost_device(problem, fatal):
    assert is_fatal(problem) == fatal


def always(problem):
    def raising(*args):
        raise problem

    return raising


def test_a_lost_device_ends_the_engine_at_once():
    engine = tiny_engine("llama")
    engine.runner.launch = always(ILLEGAL)
    submit_to(engine, [prompt_of(9, seed=1)])
    with pytest.raises(torch.AcceleratorError):
        engine.step()


def test_failed_steps_in_a_row_end_the_engine_and_others_do_not():
    engine = tiny_engine("llama")
    launch, prompt = engine.runner.launch, prompt_of(9, seed=1)
    for _ in range(2):
        engine.runner.launch = always(NO_ROOM)
        for _ in range(MOST_FAILED_STEPS - 1):
            (failed,) = submit_to(engine, [prompt])
            engine.run()
            assert failed.finish == "error"
        engine.runner.launch = launch
        (fine,) = submit_to(engine, [prompt])
        engine.run()
        assert fine.outputs == greedy("llama", prompt)
    engine.runner.launch = always(NO_ROOM)
    for _ in range(MOST_FAILED_STEPS - 1):
        submit_to(engine, [prompt])
        engine.run()
    submit_to(engine, [prompt])
    with pytest.raises(EngineFailed, match=f"{MOST_FAILED_STEPS} steps in a row failed, .*memory"):
        engine.run()


# -- nobody waits for processes that end or start ------------------------------------------------


def test_requests_are_taken_while_workers_are_killed_and_started(tmp_path):
    """`submit` is called by a server's event loop: it must not wait until a group has ended, or has loaded."""
    go = tmp_path / "go"

    class Slow(ForkedProcess):
        def wait(self, timeout=60):
            deadline = time.monotonic() + timeout
            while not go.exists():
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("a slow worker", timeout)
                time.sleep(0.005)
            return super().wait(timeout)

    def second_waits(boot):
        if (tmp_path / "first").exists():
            wait_until(go.exists)
        (tmp_path / "first").touch()

    options = ProcessOptions(beat_s=0.05, restarts=1)
    client = EngineClient(CONFIG, options, spawn=lambda boot: Slow(boot, second_waits))
    try:
        stream = begun(client)
        client._group.processes[0].kill()
        with pytest.raises(EngineFailed, match="SIGKILL"):
            read(stream)
        assert "SIGKILL" in client.restarting
        taken = []
        submitting = threading.Thread(
            target=lambda: taken.extend(submit(client, PROMPT, GREEDY) for _ in range(3))
        )
        submitting.start()
        submitting.join(PATIENCE_S / 2)
        assert len(taken) == 3  # none of them waits for `go`
        go.touch()
        assert [len(read(stream)) for stream in taken] == [12] * 3
        assert client.restarting is None
    finally:
        go.touch()
        client.close(0.0)


def test_a_command_to_a_worker_that_has_just_ended_does_not_wait_for_another():
    with running() as client:
        group = client._group
        with client._lock:  # nobody looks after the group meanwhile
            group.processes[0].kill()
            group.processes[0].wait()
            sending = threading.Thread(target=group.send, args=(), daemon=True)
            sending.start()
            sending.join(PATIENCE_S / 2)
            assert not sending.is_alive()


def test_a_process_that_survives_sigkill_is_not_waited_for(monkeypatch):
    """As one inside a call of a driver."""
    monkeypatch.setattr(process, "KILL_S", 0.2)

    class Stuck(ForkedProcess):
        stuck = False

        def wait(self, timeout=60):
            if self.stuck:
                time.sleep(timeout)
                raise subprocess.TimeoutExpired("a stuck worker", timeout)
            return super().wait(timeout)

    made = []

    def spawn(boot):
        made.append(Stuck(boot, at_step(3, hang_here) if not made else lambda boot: None))
        return made[-1]

    options = ProcessOptions(beat_s=0.05, watchdog_s=1.0, restarts=1)
    client = EngineClient(CONFIG, options, spawn=spawn)
    try:
        made[0].stuck = True
        with pytest.raises(EngineFailed, match="no step has ended"):
            read(submit(client, PROMPT, LONG))
        assert len(read(submit(client, PROMPT, GREEDY))) == 12
        wait_until(lambda: made[0].poll() is not None)
    finally:
        client.close(0.0)


def test_a_group_that_never_loads_is_found_while_nobody_waits(tmp_path):
    def second_never_loads(boot):
        if (tmp_path / "first").exists():
            hang_here()
        (tmp_path / "first").touch()

    options = ProcessOptions(beat_s=0.05, restarts=1, start_s=PATIENCE_S)
    with running(options, second_never_loads) as client:
        client.options = ProcessOptions(beat_s=0.05, restarts=1, start_s=0.3)
        client._group.processes[0].kill()
        wait_until(lambda: not client.alive)
        with pytest.raises(EngineFailed, match=r"not ready again after 0.3 s"):
            submit(client, PROMPT, GREEDY)


# -- calls have limits ---------------------------------------------------------------------------


def stuck_read(boot):
    Controls.read_adapter = lambda engine, folder: hang_here()


def test_an_adapter_that_is_never_read_fails_alone_and_the_watchdog_goes_on(tmp_path):
    """Steps go on beside it. A hang meanwhile is found."""
    options = ProcessOptions(beat_s=0.05, watchdog_s=1.5, restarts=0)

    def prepare(boot):
        stuck_read(boot)
        at_step(30, hang_here)(boot)

    with running(options, prepare) as client:
        failures = []

        def load():
            with pytest.raises(EngineFailed) as caught:
                client.load_adapter(1, str(tmp_path))
            failures.append(caught.value.message)

        loading = threading.Thread(target=load)
        loading.start()
        wait_until(lambda: client._calls._pending)
        assert len(read(submit(client, PROMPT, GREEDY))) == 12
        loading.join(PATIENCE_S)
        assert failures == ["LoadAdapter was not carried out within 1.5 s"]
        assert client.alive
        loading = threading.Thread(target=load)
        loading.start()
        with pytest.raises(EngineFailed, match="no step has ended"):
            read(submit(client, PROMPT, LONG))
        loading.join(PATIENCE_S)
        assert len(failures) == 2


def test_adapters_that_fail_do_not_take_later_ones_of_their_number_along(tmp_path):
    with running() as client:
        for _ in range(50):
            with pytest.raises(CairnError, match="absent"):
                client.load_adapter(2, str(tmp_path / "absent"))


def test_a_call_that_hangs_ends_the_group():
    def prepare(boot):
        Controls.reset_prefix_cache = lambda engine: hang_here()

    options = ProcessOptions(beat_s=0.05, watchdog_s=1.0, restarts=1)
    with running(options, prepare) as client:
        with pytest.raises(EngineFailed, match="ResetPrefixCache was not carried out within 1 s"):
            client.reset_prefix_cache()
        assert len(read(submit(client, PROMPT, GREEDY))) == 12
        assert client.restarted == 1


def test_an_engine_in_a_thread_answers_calls_in_time_or_raises(monkeypatch):
    monkeypatch.setattr("cairn.serve.engine_thread.CALL_TIMEOUT_S", 0.3)
    hold = threading.Event()
    host = EngineThread(start(CONFIG).engine)
    monkeypatch.setattr(host.engine, "resume", hold.wait)
    try:
        with pytest.raises(EngineFailed, match=r"has not carried out a call for 0\.3 s"):
            host.resume()
        host.give_up("a test")
        with pytest.raises(ConfigError, match="the engine has hung: a test"):
            host.pause()
        assert host.dead() == "the engine has hung: a test"
    finally:
        hold.set()
        host.close()
    host._thread.join(PATIENCE_S)
    assert not host._thread.is_alive()


def test_calls_of_a_broken_job_thread_are_answered():
    class Broken(JobThread):
        def _step(self):
            raise ILLEGAL

        def _pause(self, keep):
            raise KeyError("a call that fails")

    host = Broken(torch.device("cpu"))
    host.start()
    with pytest.raises(KeyError, match="a call that fails"):
        host.pause()
    wait_until(host.dead)
    assert "illegal memory access" in host.dead()
    with pytest.raises(ConfigError, match="illegal memory access"):
        host.resume()
    host.close()


# -- several ranks -------------------------------------------------------------------------------


def test_an_adapter_that_one_rank_cannot_read_is_loaded_by_none(tmp_path):
    def prepare(boot):
        if boot.rank == 0:
            Controls.read_adapter = lambda engine, folder: object()
            Controls.load_adapter = lambda *args: (tmp_path / "loaded").touch()

    config = msgspec.structs.replace(CONFIG, tensor_parallel_size=2)
    options = ProcessOptions(beat_s=0.05, restarts=0)
    with running(options, prepare, config) as client:
        stream = begun(client)
        with pytest.raises(CairnError, match="another rank could not read the adapter in"):
            client.load_adapter(1, str(tmp_path / "nowhere"))
        assert not (tmp_path / "loaded").exists()
        stream.abort()
        assert len(read(submit(client, PROMPT, GREEDY))) == 12


def test_ranks_of_which_one_cannot_sleep_stay_awake():
    def prepare(boot):
        if boot.rank == 1:
            Controls.check_sleep = always(ConfigError("its checkpoint is gone"))

    config = msgspec.structs.replace(CONFIG, tensor_parallel_size=2)
    with running(ProcessOptions(beat_s=0.05, restarts=0), prepare, config) as client:
        with pytest.raises(CairnError, match="another rank could not sleep"):
            client.sleep()
        assert len(read(submit(client, PROMPT, GREEDY))) == 12


@pytest.mark.parametrize("together", [False, True])
def test_a_graph_without_memory_is_an_error_only_among_several_ranks(together):
    """The others have launched collectives of it, and would wait for this rank until NCCL's timeout."""
    limits = Limits(rows=4, step_tokens=64, context=64, pages=9, page_size=16, vocabulary=100)
    graphs = Graphs(limits, always(NO_ROOM), always(NO_ROOM), together=together)
    shape = graphs.common_shapes()[0]
    if together:
        with pytest.raises(torch.OutOfMemoryError):
            graphs.capture(shape)
    else:
        graphs.capture(shape)
        assert graphs._captured == {shape: None}
