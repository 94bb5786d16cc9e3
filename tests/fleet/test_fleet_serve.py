"""`cairn fleet serve` as a person starts it: real servers, killed while they answer."""

import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

PATIENCE_S = 60
FILE = """
[router]
port = 0
[[servers]]
model = "cairn-tiny"
count = 2
args = ["--dtype", "float32"]
"""


class Fleet:
    def __init__(self, file) -> None:
        self.file, self.log = file, file.with_suffix(".log")
        with self.log.open("w") as out:
            command = [sys.executable, "-m", "cairn", "fleet", "serve", str(file)]
            self.process = subprocess.Popen(
                command, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        self.url = self.wait_for(r"^ready: .* at (http://\S+)$")

    def wait_for(self, pattern: str) -> str:
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            if found := re.search(pattern, self.log.read_text(), re.MULTILINE):
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise TimeoutError(self.log.read_text())

    def pid(self, number: int) -> int:
        return int(re.findall(rf"server-{number} \(process (\d+)\)", self.log.read_text())[-1])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    file = tmp_path_factory.mktemp("fleet") / "fleet.toml"
    file.write_text(FILE)
    made = Fleet(file)
    yield made
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(PATIENCE_S) == 0


def ask(fleet: Fleet, number: int) -> str:
    body = {"model": "cairn-tiny", "prompt": f"The {number}th story begins", "max_tokens": 48,
            "temperature": 0, "stream": True, "ignore_eos": True}  # fmt: skip
    with httpx.stream(
        "POST", f"{fleet.url}/v1/completions", json=body, timeout=PATIENCE_S
    ) as answer:
        text = answer.read().decode()
    assert answer.status_code == 200, text
    assert text.endswith("data: [DONE]\n\n")
    assert '"error"' not in text
    return "".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', text))


def shown(fleet: Fleet) -> dict:
    return httpx.get(f"{fleet.url}/cairn/fleet", timeout=60).json()


def test_kill_nine_under_load_loses_no_request_and_changes_no_token(fleet):
    alone = [ask(fleet, number) for number in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, fleet, number % 3) for number in range(6)]
        while not (
            busy := [at for at, one in enumerate(shown(fleet)["servers"]) if one["running"]]
        ):
            time.sleep(0.01)
        os.kill(fleet.pid(busy[0]), signal.SIGKILL)
        found = [answer.result(PATIENCE_S) for answer in answers]
    assert found == alone * 2
    assert shown(fleet)["moved"] >= 1
    fleet.wait_for(rf"(server-{busy[0]} ended with status -9)")


def test_a_wrong_file_changes_nothing_and_a_right_one_is_taken(fleet):
    fleet.file.write_text(FILE + "cout = 3\n")
    fleet.process.send_signal(signal.SIGHUP)
    fleet.wait_for(r"(the file was not taken: unknown field 'servers\[0\].cout')")
    fleet.file.write_text(FILE.replace("port = 0", 'port = 0\npolicy = "lmetric"'))
    fleet.process.send_signal(signal.SIGHUP)
    fleet.wait_for(r"(the file was taken: 2 servers, policy lmetric)")
    assert shown(fleet)["policy"] == "lmetric"


PARENT = """
import uvloop
from cairn.fleet.config import ServerGroup
from cairn.fleet.server_process import ServerProcess

class Sleeper(ServerProcess):
    command = ["sh", "-c", "echo ready after 0 s >&2; exec sleep 60"]

uvloop.run(Sleeper(ServerGroup(model="x"), "sleeper", lambda text: print(text, flush=True)).run())
"""


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_servers_end_with_a_router_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    pid = int(re.search(r"process (\d+)", parent.stdout.readline())[1])
    assert lives(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    ends = time.monotonic() + 10
    while lives(pid) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not lives(pid)
