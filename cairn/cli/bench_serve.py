"""`cairn bench serve`: load on a running server, ours or any that speaks OpenAI's API. Measures nothing itself."""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from cairn.core.config import load
from cairn.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from cairn.bench.load_answer import Record
    from cairn.bench.load_row import Row
    from cairn.bench.load_setup import Load, Setup

DATASETS = ("random", "sharegpt-like", "trace")
DURATION_S = 30.0


class BenchServe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Put load on a running server and measure what each request gets.

    With --rate requests come at their own times, whatever the server does (open loop); with --concurrency alone there
    are always so many (closed loop). Several of either make a sweep. Datasets: random; sharegpt-like; trace FILE, where
    FILE is a JSONL file in Mooncake's format or a CSV file in Azure's.
    """

    url: str
    """the server, such as http://127.0.0.1:8000"""
    rate: list[float] = []
    """requests per second; inf sends all at once; several are measured one after the other"""
    concurrency: list[int] = []
    """so many requests at a time; beside --rate, the most in flight"""
    duration: float | None = None
    """seconds in which requests are begun; by default 30, where there is no --num-requests"""
    num_requests: int | None = None
    """how many requests, for each rate"""
    arrivals: Literal["poisson", "constant", "gamma"] = "poisson"
    """how the times of an open loop are drawn; gamma comes in bursts"""
    burstiness: float = 0.25
    """with --arrivals gamma: its shape; 1 is Poisson, less is burstier"""
    dataset: list[str] = []
    """what is asked: random (default), sharegpt-like, or trace FILE"""
    input_len: int | None = None
    """tokens of a random prompt (128); the most of the other datasets"""
    output_len: int | None = None
    """tokens of a random answer (64); the most of the other datasets"""
    endpoint: Literal["completions", "chat"] = "completions"
    """/v1/completions or /v1/chat/completions"""
    prompt_form: Literal["auto", "tokens", "text"] = "auto"
    """send token ids or words; auto sends ids where the endpoint takes them"""
    vocab: int = 10_000
    """token ids are drawn below this"""
    model: str | None = None
    """name of the model; by default the first of /v1/models"""
    temperature: float = 0.0
    """of sampling"""
    ignore_eos: bool = True
    """ask for answers of full length; a server that does not know this field passes over it"""
    extra_body: str = "{}"
    """more fields for each request, as a JSON object"""
    api_key_env: str | None = None
    """name of the environment variable that holds the key of the server"""
    timeout: float = 600.0
    """seconds after which a request counts as failed"""
    warmup: int = 4
    """requests before the first that counts; at least one"""
    slo_ttft_ms: float | None = None
    """a good request has its first token within this"""
    slo_tpot_ms: float | None = None
    """a good request needs at most this per further token"""
    slo_e2e_ms: float | None = None
    """a good request ends within this"""
    seed: int = 0
    """of arrivals, lengths and prompts"""
    label: str = "server"
    """what to call the server in the results"""
    report: Path | None = None
    """write a page with plots to this file"""
    records: Path | None = None
    """write every request to this file, a JSON object per line"""
    out: Path | None = None
    """write the rows to this file, after each one"""
    merge: bool = False
    """with --out: keep the rows of the file that this run does not measure"""
    commit: str | None = None
    """the commit that is measured, where there is no git"""
    json: bool = False
    """print the whole document as JSON; lines go to stderr"""


def run(args: list[str]) -> int:
    options = load(BenchServe, args=args, env_prefix="CAIRN_BENCH_SERVE_").value
    _check(options)
    from cairn.bench.load_report import render
    from cairn.bench.load_row import read, report
    from cairn.bench.record import origin, repeatable, require_commit, write
    from cairn.cli.load_table import line, table

    setup, loads = read_setup(options)
    for path in (options.report, options.records, options.out):
        _require_writable(path)
    if options.out is not None:
        require_commit(options.commit)
    old = read(options.out) if options.merge and options.out and options.out.exists() else None
    command = repeatable(["bench", "serve"], _without(args, "--report", "--records"))
    source = origin(command, _machine(), options.commit)
    rows: list[Row] = []
    measured: list[list[Record]] = []

    def finished(row: "Row", records: "list[Record]") -> None:
        rows.append(row)
        measured.append(records)
        _say(line(row), options)
        if options.out is not None:
            write(report(source, rows, old), options.out)

    _allow_many_connections()
    asyncio.run(_sweep(setup, loads, finished))
    document = report(source, rows, old)
    if options.records is not None:
        _write_records(options.records, rows, measured)
    if options.report is not None:
        ahead = len(document.rows) - len(rows)  # rows of the old file
        page = render(document, {ahead + at: records for at, records in enumerate(measured)})
        options.report.write_text(page, encoding="utf-8")
        _say(f"report: {options.report}", options)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    _say("\n" + table(rows), options)
    return 1 if any(row.completed == 0 for row in rows) else 0


async def _sweep(
    setup: "Setup", loads: "list[Load]", finished: "Callable[[Row, list[Record]], None]"
) -> None:
    from cairn.bench.load_client import LoadClient
    from cairn.bench.serve_bench import find_model, measure, warm_up
    from cairn.cli.load_progress import LoadProgress

    if not setup.target.model:
        async with LoadClient(setup.target) as client:
            target = msgspec.structs.replace(setup.target, model=await find_model(client))
        setup = msgspec.structs.replace(setup, target=target)
    watch = LoadProgress()
    async with LoadClient(setup.target) as client:
        await warm_up(client, setup)
        for place, one in enumerate(loads):
            try:
                row, records = await measure(client, setup, one, place, watch)
            finally:
                watch.clear()
            finished(row, records)


def read_setup(options: BenchServe) -> "tuple[Setup, list[Load]]":
    from cairn.bench.arrival_traces import read_trace
    from cairn.bench.load_client import Target
    from cairn.bench.load_setup import Load, Setup
    from cairn.bench.load_stats import Slo

    dataset, file = _dataset(options.dataset)
    target = Target(
        url=options.url.rstrip("/"), model=options.model or "", endpoint=options.endpoint,
        api_key=_key(options.api_key_env), temperature=options.temperature, ignore_eos=options.ignore_eos,
        extra=_extra(options.extra_body), timeout_s=options.timeout,
    )  # fmt: skip
    form = "text" if options.endpoint == "chat" else "tokens"
    duration_s = options.duration
    if duration_s is None and options.num_requests is None:
        duration_s = DURATION_S
    setup = Setup(
        target=target, label=options.label, dataset=dataset,
        trace=read_trace(file) if file is not None else [],
        input_tokens=options.input_len, output_tokens=options.output_len,
        form=form if options.prompt_form == "auto" else options.prompt_form, vocab=options.vocab,
        arrivals=options.arrivals, burstiness=options.burstiness,
        count=options.num_requests, duration_s=duration_s,
        limit=options.concurrency[0] if options.rate and options.concurrency else None,
        warmup=options.warmup, seed=options.seed,
        slo=Slo(ttft_s=_seconds(options.slo_ttft_ms), tpot_s=_seconds(options.slo_tpot_ms),
                e2e_s=_seconds(options.slo_e2e_ms)),
    )  # fmt: skip
    if options.rate:
        return setup, [Load(rate=rate) for rate in options.rate]
    if options.concurrency:
        return setup, [Load(concurrency=number) for number in options.concurrency]
    if dataset != "trace":
        raise UsageError(
            "neither --rate nor --concurrency is given",
            hint="--rate 5 for five requests per second, --concurrency 8 for eight at a time",
        )
    return setup, [Load()]


def _check(options: BenchServe) -> None:
    from cairn.bench.load_client import place

    place(options.url)
    above = {"--duration": options.duration, "--num-requests": options.num_requests, "--input-len": options.input_len,
             "--output-len": options.output_len, "--timeout": options.timeout, "--vocab": options.vocab,
             "--warmup": options.warmup, "--burstiness": options.burstiness, "--slo-ttft-ms": options.slo_ttft_ms,
             "--slo-tpot-ms": options.slo_tpot_ms, "--slo-e2e-ms": options.slo_e2e_ms}  # fmt: skip
    for name, value in above.items():
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name} is {value}", hint="it is above 0")
    for rate in options.rate:
        if not rate > 0:
            raise UsageError(f"--rate is {rate}", hint="requests per second, above 0; or inf")
    if any(number < 1 for number in options.concurrency):
        raise UsageError(f"--concurrency is {min(options.concurrency)}", hint="at least 1")
    if options.rate and len(options.concurrency) > 1:
        raise UsageError("several --concurrency beside --rate", hint="one sweep at a time")
    if (
        float("inf") in options.rate
        and options.num_requests is None
        and options.dataset[:1] != ["trace"]
    ):
        raise UsageError("--rate inf without --num-requests", hint="say how many to send")
    if options.merge and options.out is None:
        raise UsageError("--merge is given without --out", hint="name the file with --out")
    if options.endpoint == "chat" and options.prompt_form == "tokens":
        raise UsageError("a chat takes no token ids", hint="use --endpoint completions")


def _dataset(words: list[str]) -> "tuple[Literal['random', 'sharegpt-like', 'trace'], Path | None]":
    match words:
        case [] | ["random"]:
            return "random", None
        case ["sharegpt-like"]:
            return "sharegpt-like", None
        case ["trace", file]:
            return "trace", Path(file)
        case ["trace"]:
            raise UsageError("--dataset trace without a file", hint="--dataset trace FILE")
    hint = did_you_mean(words[0], DATASETS, otherwise="random, sharegpt-like or trace FILE")
    raise UsageError(f"there is no dataset '{' '.join(words)}'", hint=hint)


def _extra(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise UsageError(f"--extra-body: {error}", hint="""such as '{"top_k": 20}'""") from None


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UsageError(f"the environment variable {variable} is not set", hint="export it first")
    return os.environ[variable]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _require_writable(path: Path | None) -> None:
    """Refuse before the measurement, and not after it."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}", hint="is there such a folder, and is it yours?")


def _allow_many_connections() -> None:
    """Each request in flight is a file: as many as this user may open, not as many as a shell says."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _machine() -> str:
    """On which the client runs; a server on loopback, too."""
    from cairn.hw.gpus import read_gpus
    from cairn.hw.host import read_cpu

    gpus, _ = read_gpus(Path("/"))
    return gpus[0].name if gpus else read_cpu(Path("/")).model or "an unknown processor"


def _without(args: list[str], *names: str) -> list[str]:
    """What only places the result is no part of the command."""
    kept = []
    skip = False
    for argument in args:
        if not skip and argument.partition("=")[0] not in names:
            kept.append(argument)
        skip = argument in names
    return kept


def _write_records(path: Path, rows: "list[Row]", measured: "list[list[Record]]") -> None:
    """Times are seconds after the first request of the point."""
    from cairn.bench.load_answer import since

    with path.open("wb") as file:
        for row, records in zip(rows, measured, strict=True):
            ordered = sorted(records, key=lambda record: record.due_s)
            for record in ordered:
                moved = msgspec.to_builtins(since(record, ordered[0].due_s))
                file.write(
                    msgspec.json.encode({"label": row.label, "load": row.load, **moved}) + b"\n"
                )


def _say(text: str, options: BenchServe) -> None:
    print(text, file=sys.stderr if options.json else sys.stdout, flush=True)
