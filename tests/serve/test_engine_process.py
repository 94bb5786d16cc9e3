"""The engine in a process of its own: streams, aborts, and everything that can happen to a process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from client_stream import submit
from forked_workers import forked

from cairn.core.errors import ConfigError
from cairn.models.generate import GenerateSampling, Generation
from cairn.models.runnable import open_model
from cairn.models.vision.picture import Picture
from cairn.serve.config import EngineConfig
from cairn.serve.engine import client as client_module
from cairn.serve.engine import process as process_module
from cairn.serve.engine.client import EngineClient, ProcessOptions
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.messages import (
    EngineFailed,
    Submit,
    decode_commands,
    encode,
    encode_submission,
)
from cairn.serve.engine.prefix_cache import page_hashes
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams

CONFIG = EngineConfig(
    model="random:tiny-llama",
    device="cpu",
    dtype="float32",
    num_gpu_blocks_override=64,
    max_num_seqs=8,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=240)
PROMPT = [5, 9, 100, 7]
QUICK = ProcessOptions(beat_s=0.05, grace_s=20.0, watchdog_s=60.0, restarts=0)


@pytest.fixture(scope="module")
def net():
    return open_model("random:tiny-llama").load("cpu", "float32").model


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch):
    """No process, no file."""
    before = {child.pid for child in psutil.Process().children()}
    # A folder of its own, with a short name: the path of a socket has little room.
    with tempfile.TemporaryDirectory(prefix="ct") as own:
        monkeypatch.setattr(tempfile, "tempdir", own)
        monkeypatch.setenv("TMPDIR", own)
        yield
        assert {child.pid for child in psutil.Process().children()} <= before
        assert not list(Path(own).glob("cairn-engine-*"))


@contextlib.contextmanager
def running(options=QUICK, prepare=lambda boot: None, config=CONFIG):
    client = EngineClient(config, options, spawn=forked(prepare))
    try:
        yield client
    finally:
        client.close(0.0)


def expected(net, prompt, most=12):
    return list(Generation(net, prompt, GenerateSampling(max_tokens=most), ()))


def read(stream):
    return [token for delta in stream for token in delta.tokens]


def begun(client, params=LONG):
    """A request that has brought its first tokens, and is far from its end."""
    stream = submit(client, PROMPT, params)
    assert next(stream).ended is None
    return stream


# -- in good order ---------------------------------------------------------------------------------


def test_streams_threads_coroutines_aborts_and_refusals(net):
    with running() as client:
        assert "random weights" in client.notes[0]
        prompts = [[*PROMPT, n] for n in range(6)]
        wanted = [expected(net, prompt) for prompt in prompts]
        assert [read(stream) for stream in [submit(client, p, GREEDY) for p in prompts]] == wanted

        async def one(prompt):
            return [
                token async for delta in submit(client, prompt, GREEDY) for token in delta.tokens
            ]

        async def all_of_them():
            return await asyncio.gather(*map(one, prompts))

        assert asyncio.run(all_of_them()) == wanted

        stream = begun(client)
        stream.abort()
        *_, last = stream
        assert (last.ended.finish, list(stream)) == ("abort", [])
        with begun(client) as stream:
            pass  # left before its end
        assert list(stream)[-1].ended.finish == "abort"
        for refused, why in (
            (submit(client, [160], GREEDY), "the vocabulary has 160 tokens"),
            (submit(client, PROMPT, SamplingParams(max_tokens=5000)), "exceed the context"),
        ):
            (delta,) = refused
            assert (delta.tokens, delta.ended.finish) == ([], "error")
            assert why in delta.ended.error
        assert not client._receivers  # nobody is left who would wait for ever

        scored = submit(
            client,
            PROMPT,
            SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0),
        )
        deltas = list(scored)
        assert sum(len(delta.logprobs) for delta in deltas) == 3
        assert [
            top[0] for delta in deltas for top, _ in (s.top for s in delta.logprobs)
        ] == expected(net, PROMPT, 3)
        assert len(deltas[0].prompt_logprobs) == len(PROMPT) - 1
        assert deltas[-1].ended.ledger.finished > deltas[-1].ended.ledger.arrived > 0


def test_a_submission_is_encoded_without_the_lock(net, monkeypatch):
    """Pictures make it long, and the event loop waits for the lock."""
    locked = []

    def spied(encode, value):
        if isinstance(value if encode is encode_submission else value[0], Submit):
            locked.append(client._lock._is_owned())
        return encode(value)

    monkeypatch.setattr(client_module, "encode_submission", partial(spied, encode_submission))
    monkeypatch.setattr(process_module, "encode", partial(spied, encode))
    with running() as client:
        assert read(submit(client, PROMPT, GREEDY)) == expected(net, PROMPT)
    assert locked == [False]


def test_pixels_are_encoded_while_other_threads_run():
    """Another thread has a good part of the CPU time meanwhile; under the interpreter lock it would have none."""
    picture = Picture(b"digest", 1, 1000, 1000, os.urandom(3_000_000))
    request = Submit(7, PROMPT, GREEDY, pictures=[picture] * 64, reader="r")
    empty = Submit(8, PROMPT, GREEDY, pictures=[Picture(b"", 0, 0, 0, b""), picture])
    for one in (request, empty):
        assert decode_commands(encode_submission(one)) == [one]
    ended, shares = threading.Event(), []
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def measure():
        own, whole = time.clock_gettime(clock), time.process_time()
        encode_submission(request)
        shares.append((time.clock_gettime(clock) - own) / (time.process_time() - whole))
        ended.set()

    threading.Thread(target=measure).start()
    while not ended.is_set():
        pass
    assert shares[0] > 0.15


def test_two_engines_on_one_host_do_not_meet(net):
    with running() as one, running(config=CONFIG) as other:
        streams = [
            submit(client, [*PROMPT, n], GREEDY) for n in range(3) for client in (one, other)
        ]
        assert [read(stream) for stream in streams] == [
            expected(net, [*PROMPT, n]) for n in range(3) for _ in range(2)
        ]


def test_closing_finishes_what_runs_and_takes_nothing_more(net):
    with running() as client:
        stream = begun(client, SamplingParams(temperature=0, max_tokens=40))
        closing = threading.Thread(target=client.close)
        closing.start()
        rest = read(stream)
        closing.join()
        assert expected(net, PROMPT, 40)[-len(rest) :] == rest
        assert stream.ended.finish == "length"
        with pytest.raises(EngineFailed, match="the engine has stopped"):
            submit(client, PROMPT, GREEDY)


@pytest.mark.parametrize(("grace_s", "finish"), [(20.0, "length"), (0.0, "abort")])
def test_sigterm_ends_the_process_in_good_order(grace_s, finish):
    options = ProcessOptions(beat_s=0.05, grace_s=grace_s, restarts=3)
    with running(options) as client:
        stream = begun(client)
        process = client._group.processes[0]
        process.send_signal(signal.SIGTERM)
        *_, last = stream
        assert last.ended.finish == finish
        client._thread.join(60)
        assert (process.returncode, client.alive, client.restarted) == (0, False, 0)


def test_what_keeps_the_engine_from_starting_is_raised_as_it_was():
    with pytest.raises(ConfigError, match="no model shape is called 'tiny-lama'") as caught:
        EngineClient(EngineConfig(model="random:tiny-lama"), QUICK, spawn=forked())
    assert "tiny-llama" in caught.value.hint


# -- out of order ---------------------------------------------------------------------------------


def at_step(number, act):
    """What a worker is made to do when it takes its n-th step."""

    def prepare(boot):
        step = Engine.step

        def broken(engine):
            if engine.steps == number:
                act()
            return step(engine)

        Engine.step = broken

    return prepare


def hang_here():
    while True:
        time.sleep(0.01)


def raise_here():
    raise KeyError("a page that nobody knows")


def failure_of(client):
    """Two requests on their way, and the one failure that both get, once."""
    streams = [submit(client, [*PROMPT, n], LONG) for n in range(2)]
    problems = []
    for stream in streams:
        with pytest.raises(EngineFailed) as caught:
            read(stream)
        problems.append(caught.value)
        assert list(stream) == []
    assert problems[0] is problems[1]
    return problems[0]


def test_kill_9_fails_what_was_on_its_way_and_the_engine_returns(net):
    options = ProcessOptions(beat_s=0.05, restarts=1)
    with running(options) as client:
        stream = begun(client)
        client._group.processes[0].send_signal(signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"ended by SIGKILL \(exit status -9\)"):
            read(stream)
        assert read(submit(client, PROMPT, GREEDY)) == expected(net, PROMPT)
        assert (client.restarted, client.alive) == (1, True)
        stream = begun(client)  # something has finished since: it may fail once more
        client._group.processes[0].send_signal(signal.SIGKILL)
        with pytest.raises(EngineFailed, match="SIGKILL"):
            read(stream)
        assert read(submit(client, PROMPT, GREEDY)) == expected(net, PROMPT)


def test_whoever_closes_does_not_wait_for_an_engine_that_is_still_loading(tmp_path):
    """It would take a model's whole loading time to stop; here that never ends."""

    def second_never_loads(boot):
        if (tmp_path / "first").exists():
            time.sleep(10_000)
        (tmp_path / "first").touch()

    with running(ProcessOptions(beat_s=0.05, restarts=1), prepare=second_never_loads) as client:
        stream = begun(client)
        client._group.processes[0].send_signal(signal.SIGKILL)
        with pytest.raises(EngineFailed, match="SIGKILL"):
            read(stream)
        client.close(grace_s=10_000)
        assert not client.alive


def test_an_exception_in_the_loop_is_told_with_its_traceback():
    with running(prepare=at_step(5, raise_here)) as client:
        problem = failure_of(client)
        assert "KeyError: 'a page that nobody knows'" in problem.message
        assert "raise_here" in problem.details
        with pytest.raises(
            EngineFailed, match="a page that nobody knows"
        ):  # no restarts: it is over
            submit(client, PROMPT, GREEDY)


def test_a_process_that_leaves_without_a_word():
    with running(prepare=at_step(3, lambda: os._exit(7))) as client:
        assert "ended without a word (exit status 7)" in failure_of(client).message


def test_a_step_that_hangs_is_found_and_its_stacks_are_told():
    options = ProcessOptions(beat_s=0.05, watchdog_s=2.5, restarts=0)
    with running(options, at_step(4, hang_here)) as client:
        problem = failure_of(client)
        assert "no step has ended for" in problem.message
        assert "4 steps were taken before" in problem.message
        assert "in hang_here" in problem.details


def test_an_engine_that_was_idle_for_long_does_not_hang():
    with running() as client:
        client._watchdog._since -= 1000
        time.sleep(0.3)  # the watchdog looks, and finds nobody waiting
        assert len(read(submit(client, PROMPT, GREEDY))) == 12


def test_the_end_of_the_parent_is_the_end_of_the_engine():
    """A real parent, a real command: fresh interpreters on both sides."""
    program = textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[1])
        from client_stream import submit
        from cairn.serve.config import EngineConfig
        from cairn.serve.engine.client import EngineClient
        from cairn.serve.engine.sampling_params import SamplingParams
        client = EngineClient(EngineConfig(model="random:tiny-llama", device="cpu", dtype="float32",
                                           num_gpu_blocks_override=64))
        assert "torch" not in sys.modules
        stream = submit(client, [1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
        assert sum(len(delta.tokens) for delta in stream) == 4
        print(client._group.processes[0].pid, client._group.folder, flush=True)
        import time; time.sleep(60)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        pid, folder = parent.stdout.readline().split()
        child = psutil.Process(int(pid))
        parent.kill()
    gone, _ = psutil.wait_procs([child], timeout=30)
    assert gone
    assert not Path(folder).exists()


def tokens_of(stream) -> list[int]:
    return [token for delta in stream for token in delta.tokens]


def test_pages_are_told_as_the_cache_stores_them_and_an_answer_goes_on_behind_its_beginning(net):
    prompt = [7 * at % 150 + 3 for at in range(40)]
    whole = expected(net, prompt)
    with running() as client:
        pages = client.follow_pages()
        assert tokens_of(submit(client, prompt, GREEDY)) == whole
        size = client.limits.page_size
        hashes = page_hashes(Request(0, prompt, GREEDY), [*prompt, *whole], size)
        told = pages.take()
        assert [event.digest for event in told] == hashes[: len(told)]
        assert len(told) >= len(prompt) // size > 0
        assert all(event.stored for event in told)
        for cut in (1, 5, len(whole) - 1):
            found = submit(client, prompt, GREEDY, outputs=whole[:cut])
            assert tokens_of(found) == whole[cut:]
        client.reset_prefix_cache()
        assert pages.take()[-1] == (False, b"")
