"""The command `cairn`: which verbs there are, and what happens to their errors.

    cairn [--debug] VERB ...   ->   import the verb's module   ->   run(args)   ->   exit status

    0    done
    1    a bug in Cairn: traceback; or a verb's own "no", such as a check of `doctor` that failed
    2    a mistake in what was asked (CairnError): `error:` and `hint:` on stderr, no traceback
    130  stopped with Ctrl-C
    141  the reader of our output has gone (`cairn ... | head`)

Imports nothing but the standard library until a verb is chosen, so that --help answers at once.
Does not know what the verbs do.
"""

import errno
import sys
from collections.abc import Sequence
from typing import NamedTuple

from cairn import __version__
from cairn.core.errors import CairnError, UsageError, did_you_mean

EXIT_BUG = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class Verb(NamedTuple):
    module: str  # it has run(args: list[str]) -> int
    help: str


VERBS = {
    "generate": Verb("cairn.cli.chat.generate", "complete a prompt with a model"),
    "chat": Verb("cairn.cli.chat.chat", "talk to a model, here or behind a server"),
    "serve": Verb("cairn.cli.serve", "serve a model over HTTP, as OpenAI's clients expect"),
    "fleet": Verb(
        "cairn.cli.fleet.fleet", "many servers behind one router that knows their caches"
    ),
    "top": Verb("cairn.cli.top", "a server, live in the terminal: requests, rates, caches, keys"),
    "data": Verb("cairn.cli.train.data", "text and chats to token stores; train a tokenizer"),
    "train": Verb("cairn.cli.train.train", "train or fine-tune a model, from a recipe"),
    "tune": Verb("cairn.cli.train.tune", "fine-tune a model; --lora trains an adapter instead"),
    "align": Verb("cairn.cli.train.align", "reinforcement learning on tasks that a program checks"),
    "tinker": Verb(
        "cairn.cli.train.tinker", "train and sample over HTTP, as Tinker's clients expect"
    ),
    "adapter": Verb("cairn.cli.train.adapter", "adapters: info, merge into the base, export"),
    "eval": Verb("cairn.cli.eval", "score a model: perplexity, multiple choice, exact match"),
    "verify": Verb("cairn.cli.verify", "does a deployment compute its model? what differs?"),
    "replay": Verb("cairn.cli.replay", "run a captured request again: which token, which layer?"),
    "quantize": Verb("cairn.cli.compress.quantize", "a model in 8 or 4 bits, and what it lost"),
    "prune": Verb("cairn.cli.compress.prune", "set weights to zero, or remove experts"),
    "launch": Verb("cairn.cli.cluster.launch", "run a job here, on Ray, on Slurm or on Kubernetes"),
    "operator": Verb("cairn.cli.cluster.operator", "Kubernetes: services and jobs as its objects"),
    "jobs": Verb("cairn.cli.cluster.jobs", "the jobs launched from here: list, logs, stop, why"),
    "chaos": Verb("cairn.cli.cluster.chaos", "break a training run on purpose; what was lost?"),
    "bench": Verb(
        "cairn.cli.bench.bench", "measure serving and kernels against the ceilings of this machine"
    ),
    "profile": Verb(
        "cairn.cli.profile.profile",
        "where the time of a step goes, beside what the hardware allows",
    ),
    "comm": Verb("cairn.cli.comm.comm", "prove collective schedules; what NCCL should choose"),
    "plan": Verb("cairn.cli.plan.plan", "does it fit, how fast, which layout, at what cost"),
    "simulate": Verb(
        "cairn.cli.cluster.simulate", "a cluster under a policy; the failures of 100k GPUs"
    ),
    "lab": Verb(
        "cairn.cli.learn.lab", "experiments: each idea predicted, measured and judged here"
    ),
    "exercise": Verb("cairn.cli.learn.exercise", "write it yourself: start, check, hint, solution"),
    "learn": Verb("cairn.cli.learn.learn", "the roadmap: the map, topics, a quiz, plans"),
    "kernels": Verb("cairn.cli.kernels", "list, compile, lint, explain and tune the kernels"),
    "calibrate": Verb("cairn.cli.calibrate", "measure the ceilings of this machine"),
    "doctor": Verb("cairn.cli.doctor", "check whether this machine is fit to run"),
    "trace": Verb(
        "cairn.cli.profile.trace", "merge recorded events into one timeline for Perfetto"
    ),
    "metrics": Verb("cairn.cli.metrics", "what the server counts, and a Grafana dashboard of it"),
    "completion": Verb("cairn.cli.completion", "Tab completion for bash, zsh or fish"),
}

# Where the package on PyPI has another name than the module.
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py"}
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
# How a system refuses a path; EEXIST: a file lies where a folder is needed.
REFUSED = (
    *FORBIDDEN,
    errno.ENOENT,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; every exception ends here."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = _take_debug(args)
    _write_what_the_terminal_can()
    try:
        status = _dispatch(args)
        sys.stdout.flush()  # here, where a reader that has gone can still be answered quietly
        return status
    except CairnError as error:
        return _report(error, debug)
    except ModuleNotFoundError as error:
        missing = _missing_package(error)
        if missing is None:
            return _report_bug()
        return _report(missing, debug)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _reader_has_gone():
            return _report_bug()
        _forget_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if (mistake := _refused_path(error, args)) is not None:
            return _report(mistake, debug)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _report_bug()
        _forget_output()
        full = CairnError(f"the disk is full ({error})", hint="make room, or write elsewhere")
        return _report(full, debug)
    except Exception as error:  # noqa: BLE001  whatever is left is a bug, and is shown as one
        if (small := _memory_ran_out(error)) is not None:
            return _report(small, debug)
        return _report_bug()


def _write_what_the_terminal_can() -> None:
    """A locale that is not UTF-8 gets question marks for what it has no letters for, and not an error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if encoding.lower().replace("-", "") != "utf8" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def help_text() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}   {verb.help}" for name, verb in VERBS.items())
    return f"""\
Cairn trains models, serves them and runs their jobs, on a laptop or a cluster.

usage: cairn [--debug] VERB [ARGUMENTS]

{verbs}

  cairn VERB --help   the flags of a verb
  --explain           after a verb: where each of its settings was written
  --version           the version of Cairn
  --debug             show the traceback of an error

CAIRN_EVENTS=FOLDER records what any verb does; `cairn trace FOLDER` draws it.
"""


def _dispatch(args: list[str]) -> int:
    match args:
        case []:
            print(help_text(), end="", file=sys.stderr)
            return UsageError.exit_status
        case ["-h" | "--help", *_]:
            print(help_text(), end="")
            return 0
        case ["--version", *_]:
            print(f"cairn {__version__}")
            return 0
        case [name, "--version"] if name in VERBS:
            return _dispatch(["--version"])
        case [name, *rest] if name in VERBS:
            return _run(name, rest)
        case [flag, *_] if flag.startswith("-"):
            raise UsageError(
                f"unknown flag '{flag}'", hint="flags of a verb stand after it; see `cairn --help`"
            )
        case [name, *_]:
            hint = did_you_mean(name, VERBS, otherwise="`cairn --help` lists the commands")
            raise UsageError(f"unknown command '{name}'", hint=hint)
    raise AssertionError("unreachable: the last case takes everything")


def _run(name: str, args: list[str]) -> int:
    import importlib

    from cairn.cli.interrupt import leave_while_importing
    from cairn.core import events

    events.listen_if_asked(name)
    try:
        with leave_while_importing(EXIT_INTERRUPTED), events.span(f"cairn {name}"):
            verb = importlib.import_module(VERBS[name].module)
            return verb.run(args)
    except SystemExit as leaving:  # tyro has printed the help
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    finally:
        events.close()


def _take_debug(args: list[str]) -> bool:
    """Removes --debug wherever it stands before `--`."""
    end = args.index("--") if "--" in args else len(args)
    kept = [arg for arg in args[:end] if arg != "--debug"]
    debug = len(kept) < end
    args[:end] = kept
    return debug


def _report(error: CairnError, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_status


def _report_bug() -> int:
    import platform
    import traceback

    traceback.print_exc()
    print(
        f"error: this is a bug in cairn {__version__} (Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}); please report it with the lines above",
        file=sys.stderr,
    )
    return EXIT_BUG


def _refused_path(error: OSError, args: Sequence[str]) -> CairnError | None:
    """A path of the command line that cannot be used is a mistake in it, and no bug; None: it is another path.

    No permission is no bug either, whatever the path is.
    """
    path = error.filename
    if error.errno not in REFUSED or not isinstance(path, str):
        return None
    said = (error.strerror or str(error)).lower()
    if error.errno in FORBIDDEN:  # by the owner of the place, wherever its name comes from
        hint = "run it in a folder where you may write, or name another one; HOME and CAIRN_CACHE count too"
        return CairnError(f"cannot use {path}: {said}", hint=hint)
    given = [arg.partition("=")[2] if arg.startswith("--") and "=" in arg else arg for arg in args]
    named = any(word and f"{word}/".startswith(f"{path}/") for word in given)
    below = error.errno not in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR) and any(
        word and path.startswith(f"{word.rstrip('/')}/") for word in given
    )
    if not named and not below:
        return None
    return CairnError(f"cannot use {path}: {said}", hint="check the path")


def _memory_ran_out(error: Exception) -> CairnError | None:
    """A model or a batch that was too large for this machine is no bug, wherever it was found out."""
    words = str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for its sake
        said = f"the memory of the GPU ran out: {words.partition(' Including ')[0]}"
    elif isinstance(error, MemoryError) or "DefaultCPUAllocator" in words:
        reason = (words.partition("Allocator: ")[2] or words).strip().partition("\n")[0]
        said = f"the memory of this machine ran out: {reason or 'Python says so'}"
    else:
        return None
    hint = "use a smaller model, batch or context; or see who else holds memory"
    return CairnError(said, hint=hint)


def _missing_package(error: ModuleNotFoundError) -> CairnError | None:
    """Error with an install hint; None for missing modules of Cairn or Python, which are bugs."""
    package = (error.name or "").partition(".")[0]
    if not package or package == "cairn" or package in sys.stdlib_module_names:
        return None
    distribution = DISTRIBUTIONS.get(package, package)
    return CairnError(
        f"the Python package '{package}' is not installed",
        hint=f"{sys.executable} -m pip install {distribution}",
    )


def _reader_has_gone() -> bool:
    """Return whether our own output is the broken pipe, and not one that a verb has opened."""
    import select

    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), select.POLLERR)
    return bool(poll.poll(0))


def _forget_output() -> None:
    """Python flushes stdout once more at exit; it must find a place where that works."""
    import os

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
