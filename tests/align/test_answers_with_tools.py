"""Answers with tools: what a tool says is read and not learnt, and a program of the model can do no harm."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from cairn.align.environment import ENVIRONMENTS, Limits, calculate, run_episodes
from cairn.align.policy import Sampled
from cairn.align.rollout import document, written
from cairn.align.sandbox import CHILD, KILLED, SandboxLimits, run_python
from cairn.align.tasks import turns_of
from cairn.train.data.batch import IGNORED
from cairn.train.data.tokenizer_trainer import train_tokenizer

LIMITS = SandboxLimits(seconds=1, wall_s=20.0, memory_bytes=256 << 20, characters=40)
REFUSED = "PermissionError"


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("import math\nprint(math.factorial(5))", "120"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("while True: pass", KILLED),
        ("print(len('x' * 10 ** 10))", "MemoryError"),
        ("while True: print('y' * 100)", "y" * 40 + " ..."),
        ("open('/etc/passwd')", REFUSED),
        ("open('here', 'w')", REFUSED),
        ("import _socket; _socket.socket()", "ModuleNotFoundError"),
        ("import os; os.fork()", REFUSED),
        ("import os; os.kill(os.getpid(), 0)", REFUSED),
        ("import ctypes; print(ctypes.CDLL(None).socket(2, 1, 0))", "-1"),
        ("import os; os._exit(97)", ""),  # as if there were no filter
    ],
)
def test_programs_compute_and_do_nothing_else(program, answer):
    found = run_python(program, LIMITS)
    assert answer in found if answer in (REFUSED, "ModuleNotFoundError") else answer == found


def test_a_program_that_waits_ends_with_its_trainer():
    waits = "import _thread\nlock = _thread.allocate_lock()\nprint('waits', flush=True)\nlock.acquire()\nlock.acquire()"
    starts = """import subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:3], str(256 << 20)], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.stdin.write(sys.argv[3].encode())
child.stdin.close()
child.wait()"""
    command = [sys.executable, "-S", "-c", starts, str(CHILD), "1", waits]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    number = int(trainer.stdout.readline())
    try:
        assert trainer.stdout.readline() == "waits\n"
        trainer.kill()
        trainer.communicate(timeout=10)  # until nobody can write there any more
    except subprocess.TimeoutExpired:
        os.kill(number, signal.SIGKILL)
        raise


def test_tools_answer_the_call_at_the_end():
    calculator = ENVIRONMENTS["calculator"]
    assert calculator.step("<calc>7 * 8 + 5</calc>") == "<result>61</result>"
    assert calculator.step("<calc>1</calc> and <calc>2 *</calc>\n") == "<result>error</result>"
    assert calculator.step("<calc>1</calc> 61") is None
    assert ENVIRONMENTS["python"].step("<python>print(2 ** 8)</python>") == "<result>256</result>"
    assert calculate("__import__('os')") == "error"


class Scripted:
    """Writes these texts, one a turn."""

    def __init__(self, *turns):
        self.tokenizer, self.turns = train_tokenizer(["<calc>1 + 2</calc>"], 512, fewer=True), turns
        self.asked = []

    def generate(self, asked, stop):
        turn = len(self.asked)
        self.asked.append(asked[0])
        tokens = self.tokenizer.encode(self.turns[turn], False)[: asked[0][1].max_tokens]
        return [Sampled(tokens, [-0.5] * len(tokens), 3, True)]


def test_an_episode_goes_on_behind_the_tool_and_only_what_was_written_is_learnt():
    policy = Scripted("<calc>3 + 4</calc>", "7")
    (found,) = run_episodes(policy, ENVIRONMENTS["calculator"], [[1, 2]], Limits(64, 2), [5])
    text = policy.tokenizer.decode(found.tokens)
    assert text == "<calc>3 + 4</calc><result>7</result>7"
    assert found.stopped
    assert found.written < len(found.tokens) == len(found.logp) == len(found.own)
    assert policy.asked[1][0] == [1, 2, *found.tokens[: -found.own[::-1].index(False)]]
    made = document([1, 2], found.tokens, found.logp, 1.0, 0.25, found.own)
    learnt = made.targets_T != IGNORED
    assert learnt[1:-1].tolist() == found.own
    assert torch.equal(made.extra["weight"], 0.25 * learnt)


def test_an_answer_without_room_for_what_the_tool_says_is_cut():
    policy = Scripted("<calc>3</calc>")
    asked, read = (
        policy.tokenizer.encode(text, False) for text in ("<calc>3</calc>", "<result>3</result>")
    )
    most = len(asked) + len(read) - 1
    (cut,) = run_episodes(policy, ENVIRONMENTS["calculator"], [[1]], Limits(most, 1), [5])
    assert cut.tokens == [*asked, *read[:-1]]
    assert not cut.stopped


def test_written_answers_leave_out_what_tools_say():
    tokenizer = Scripted().tokenizer
    answer = "<calc>1 + 2</calc><result>3</result>3"
    assert turns_of(answer) == [
        ("<calc>1 + 2</calc>", True),
        ("<result>3</result>", False),
        ("3", True),
    ]
    tokens, own = written(tokenizer, answer)
    assert (
        tokenizer.decode([t for t, ours in zip(tokens, own, strict=True) if not ours])
        == "<result>3</result>"
    )
