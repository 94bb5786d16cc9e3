"""The command answers at once, and every way to end has its own status and its own words."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cairn import __version__
from cairn.cli.main import VERBS, main
from cairn.core.records import Span, read

HEAVY = ("torch", "rich", "tyro", "msgspec", "numpy")


def cairn(*args: str, env: dict[str, str] | None = None, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "cairn", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
        **options,
    )


@pytest.fixture
def verb(tmp_path):
    """A command line whose one verb is the given code."""

    def start(code: str, *args: str) -> list[str]:
        (tmp_path / "odd_verb.py").write_text(textwrap.dedent(code))
        launcher = tmp_path / "launcher.py"
        launcher.write_text(
            "import sys\n"
            "from cairn.cli import main\n"
            "main.VERBS['odd'] = main.Verb('odd_verb', 'for this test')\n"
            "sys.exit(main.main())\n"
        )
        return [sys.executable, str(launcher), *args]

    return start


def run(command: list[str], **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_help_lists_every_verb_on_one_line():
    done = cairn("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name, verb in VERBS.items():
        assert any(line.split() == [name, *verb.help.split()] for line in done.stdout.splitlines())


def test_help_needs_less_than_a_third_of_a_second_of_cpu():
    seconds = []
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-m", "cairn", "--help"], stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        seconds.append(usage.ru_utime + usage.ru_stime)
    assert min(seconds) < 0.3


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_imports_nothing_heavy(flag):
    script = (
        "import sys\n"
        "from cairn.cli.main import main\n"
        "status = main(sys.argv[2:])\n"
        "loaded = set(sys.argv[1].split()) & sys.modules.keys()\n"
        "sys.exit(f'loaded {loaded}' if loaded else status)\n"
    )
    done = run([sys.executable, "-c", script, " ".join(HEAVY), flag])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_help_of_no_verb_imports_torch_and_all_of_it_fits_80_columns():
    """All of them in one process, which ends at the first that does."""
    script = (
        "import sys\n"
        "from cairn.cli.main import VERBS, main\n"
        "for verb in VERBS:\n"
        "    status = main([verb, '--help'])\n"
        "    if status or 'torch' in sys.modules:\n"
        "        sys.exit(f'{verb}: status {status}, or it has loaded torch')\n"
    )
    done = run([sys.executable, "-c", script], env={**os.environ, "COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"cairn {verb}" in done.stdout for verb in VERBS)
    lines = done.stdout.splitlines()
    assert not [line for line in lines if len(line) > 80]
    assert "{None}" not in "".join(line for line in lines if line.startswith("usage"))


@pytest.mark.parametrize("args", [["--version"], ["serve", "--version"], ["plan", "--version"]])
def test_the_version(args):
    assert cairn(*args).stdout == f"cairn {__version__}\n"


def test_without_a_verb_the_help_is_an_error():
    done = cairn()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == cairn("--help").stdout


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["docter"], "unknown command 'docter'", "did you mean 'doctor'?"),
        (["zebra"], "unknown command 'zebra'", "`cairn --help` lists the commands"),
        (["--bad"], "unknown flag '--bad'", "flags of a verb stand after it; see `cairn --help`"),
        (["trace"], "PATHS is missing", "write `cairn trace PATHS ...`, or set CAIRN_TRACE_PATHS"),
        (["trace", "x", "--ot", "y"], "unknown flag '--ot' (value 'y')", "did you mean '--out'?"),
        (["trace", "/absent", "--json"], "cannot read /absent: no such file", "check the path"),
        (["trace", "/absent", "--from", "5"], "cannot read the duration '5'", "write a number"),
    ],
)
def test_a_mistake_is_two_lines_on_stderr(args, message, hint):
    done = cairn(*args)
    assert (done.returncode, done.stdout) == (2, "")
    error_line, hint_line = done.stderr.splitlines()
    assert error_line.startswith(f"error: {message}")
    assert hint_line.startswith(f"hint: {hint}")


@pytest.mark.parametrize("args", [["--debug", "trace", "/absent"], ["trace", "/absent", "--debug"]])
def test_debug_shows_the_traceback_of_a_mistake(args):
    done = cairn(*args)
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback")
    assert "error: cannot read /absent" in done.stderr


def test_debug_after_two_dashes_is_an_argument():
    done = cairn("trace", "--", "--debug")
    assert done.stderr.startswith("error: cannot read --debug: ")


def test_the_status_of_a_verb_is_that_of_the_command(verb):
    assert run(verb("def run(args): return len(args)", "odd", "a", "b", "c")).returncode == 3


def test_a_bug_keeps_its_traceback_and_is_called_one(verb):
    done = run(verb("def run(args): return {}['missing']", "odd"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Traceback")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: this is a bug in cairn {__version__} (Python 3.")


@pytest.mark.parametrize(
    ("statement", "message", "hint"),
    [
        (
            "import zebra.stripes",
            "the Python package 'zebra' is not installed",
            "pip install zebra",
        ),
        ("raise ModuleNotFoundError(name='pynvml')", "'pynvml' is not", "pip install nvidia-ml-py"),
    ],
)
def test_a_missing_package_is_named_with_its_installation(verb, statement, message, hint):
    done = run(verb(f"def run(args):\n    {statement}", "odd"))
    assert done.returncode == 2
    error_line, hint_line = done.stderr.splitlines()
    assert message in error_line
    assert hint_line.endswith(hint)


@pytest.mark.parametrize("module", ["cairn.absent", "asyncio.absent"])
def test_a_missing_module_of_our_own_or_of_python_is_a_bug(verb, module):
    done = run(verb(f"import {module}", "odd"))
    assert done.returncode == 1
    assert "this is a bug in cairn" in done.stderr


def test_an_interrupt_ends_quietly(verb):
    code = """
        import time
        def run(args):
            print("ready", flush=True)
            time.sleep(60)
    """
    child = subprocess.Popen(verb(code, "odd"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert (child.returncode, output, errors) == (130, b"", b"")


LONG = "def run(args):\n    for n in range(100_000): print(n)\n    return 0"
SHORT = "def run(args):\n    print('one line')\n    return 0"


@pytest.mark.parametrize("code", [LONG, SHORT], ids=["long", "short"])
def test_a_reader_that_has_gone_is_no_error(verb, code):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            verb(code, "odd"), stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_into_a_closed_pipe_is_quiet_too():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cairn", "trace", "--help"],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_broken_pipe_inside_a_verb_is_a_bug(verb):
    code = """
        import os
        def run(args):
            reading, writing = os.pipe()
            os.close(reading)
            os.write(writing, b"x")
    """
    done = run(verb(code, "odd"))
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr
    assert "this is a bug" in done.stderr


def test_a_full_disk_is_no_bug(verb):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(verb(SHORT, "odd"), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the disk is full")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("raise MemoryError", "this machine ran out: Python says so"),
        ("import numpy; numpy.empty(1 << 50)", "this machine ran out: Unable to allocate 8.00 PiB"),
        ("import torch; torch.empty(1 << 50)", "this machine ran out: "),
        (
            "raise type('OutOfMemoryError', (RuntimeError,), {})('Tried 1 GiB. Including non-PyTorch')",
            "the GPU ran out: Tried 1 GiB.",
        ),
    ],
)
def test_too_little_memory_is_no_bug(verb, statement, words):
    done = run(verb(f"def run(args):\n    {statement}", "odd"))
    assert done.returncode == 2
    mistake, hint = done.stderr.splitlines()
    assert mistake.startswith(f"error: the memory of {words}")
    assert hint.startswith("hint: use a smaller model")


def test_a_path_that_cannot_be_used_is_a_mistake_if_the_user_named_it_and_else_a_bug(
    verb, tmp_path
):
    missing = tmp_path / "none" / "page.html"
    code = f"""
        def run(args):
            open({str(missing)!r}, "w")
    """
    for args in (["--html", str(missing)], [f"--html={missing}"], [str(missing.parent)]):
        done = run(verb(code, "odd", *args))
        if args == [
            str(missing.parent)
        ]:  # a file that nobody spoke of, in a folder that somebody did
            assert (done.returncode, "this is a bug" in done.stderr) == (1, True)
        else:
            said = f"error: cannot use {missing}: no such file or directory\nhint: check the path\n"
            assert (done.returncode, done.stderr) == (2, said)


def test_a_file_where_a_folder_is_needed_is_a_mistake(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("here")
    assert main(["operator", "manifests", str(file)]) == 2
    assert f"cannot use {file}: file exists" in capsys.readouterr().err


def test_events_of_any_verb_are_recorded_when_asked_for(tmp_path, verb):
    code = """
        from cairn.core.events import span
        def run(args):
            with span("work", amount=3):
                raise ValueError
    """
    events = tmp_path / "events"
    command = verb(code, "odd")
    assert run(command, env={**os.environ, "CAIRN_EVENTS": str(events)}).returncode == 1
    (path,) = events.iterdir()
    process, *records = read(path)
    assert path.name == f"odd-{process.pid}.jsonl"
    assert process.name == "cairn odd"
    spans = {record.name: record for record in records if isinstance(record, Span)}
    assert spans["work"].fields == {"amount": 3}
    assert spans["cairn odd"].error == "ValueError"


def test_events_that_cannot_be_recorded_are_an_error(tmp_path):
    (tmp_path / "file").touch()
    done = cairn("trace", "x", env={"CAIRN_EVENTS": str(tmp_path / "file")})
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write events to ")


def test_trace_merges_what_commands_have_recorded(tmp_path):
    events = tmp_path / "events"
    for _ in range(2):
        cairn("trace", "/absent", env={"CAIRN_EVENTS": str(events)})
    out = tmp_path / "trace.json"
    done = cairn("trace", str(events), "--out", str(out), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert (summary["out"], summary["processes"], summary["events"]) == (str(out), 2, 2)
    names = [event["name"] for event in json.loads(out.read_text())["traceEvents"]]
    assert names.count("cairn trace") == 2

    done = cairn("trace", str(events), "--out", str(out), "--from", "1h")
    assert done.stdout.startswith(f"wrote {out}: 2 processes, 0 events, ")
    assert done.stdout.endswith("open it in https://ui.perfetto.dev\n")


def test_a_folder_that_may_not_be_written_is_no_bug_wherever_its_name_comes_from(verb):
    code = """
        def run(args):
            raise PermissionError(13, "Permission denied", "exercises")
    """
    done = run(verb(code, "odd"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot use exercises: permission denied\nhint: run it in")


def test_ctrl_c_while_torch_is_imported_ends_the_verb(tmp_path, verb):
    """A C extension may swallow the exception; here a module of that name does."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    import time; time.sleep(1)\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    code = f"""
        def run(args):
            import sys
            sys.path.insert(0, {str(tmp_path)!r})
            import torch
            print("goes on")
            return 0
    """
    done = run(verb(code, "odd"))
    assert (done.returncode, done.stdout) == (130, "")


def test_letters_that_a_terminal_does_not_have_become_question_marks(verb):
    code = """
        def run(args):
            print("ok 你好")
            return 0
    """
    done = run(verb(code, "odd"), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "ok ??\n")
