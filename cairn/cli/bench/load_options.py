"""The options of `cairn bench serve`, and how they become the setting of a load test.

Refuses what makes no sense before anything is sent. Knows nothing about running the test.
"""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from cairn.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from cairn.bench.load_setup import Dataset, LoadLevel, LoadSetup

DATASETS = ("random", "sharegpt-like", "conversations", "agents", "long", "trace")
DURATION_S = 30.0


class BenchServe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Put load on a running server and measure what each request gets.

    With --rate requests come at their own times, whatever the server does (open loop); with --concurrency alone there
    are always so many (closed loop). Several of either make a sweep; --find-rate looks for the highest rate that keeps
    the limits of --slo-*. Datasets: random; sharegpt-like, or conversations, which is the same; agents; long; trace
    FILE, where FILE is a JSONL file in Mooncake's format or a CSV file in Azure's.
    """

    url: str | None = None
    """the server, such as http://127.0.0.1:8000"""
    start: str | None = None
    """instead of --url: start `cairn serve` with these arguments for the time of the test"""
    rate: list[float] = []
    """requests per second; inf sends all at once; several are measured one after the other"""
    find_rate: bool = False
    """search the highest rate that holds the limits, from --rate LOW HIGH, or upwards from one --rate"""
    resolution: float = 0.05
    """with --find-rate: how near to the first rate that is broken, as a share of it"""
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
    """what is asked: random (default), sharegpt-like, agents, long, or trace FILE"""
    mix: Literal["none", "sampled", "logprobs", "structured"] = "none"
    """what requests ask for besides: other sampling parameters each, log-probabilities, answers by a JSON schema"""
    cold: bool = False
    """measure the first load twice: before any warm-up, as a fresh server gets it, and after it"""
    input_len: int | None = None
    """tokens of a random prompt (128); the most of the other datasets"""
    output_len: int | None = None
    """tokens of a random answer (64); the most of the other datasets"""
    endpoint: Literal["completions", "chat"] = "completions"
    """/v1/completions or /v1/chat/completions"""
    prompt_form: Literal["auto", "tokens", "text"] = "auto"
    """send token ids or words; auto sends ids where the endpoint takes them"""
    vocab: int = 10_000
    """token ids are drawn below this, and below the vocabulary that the server tells"""
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
    warmup_duration: float = 0.0
    """after them, seconds of the first load that do not count"""
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
    html: Path | None = None
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


def read_setup(options: BenchServe) -> "tuple[LoadSetup, list[LoadLevel]]":
    from cairn.bench.arrival_traces import read_trace
    from cairn.bench.load_client import Target
    from cairn.bench.load_setup import LoadLevel, LoadSetup
    from cairn.bench.load_stats import LatencySlo

    dataset, file = _dataset(options.dataset)
    target = Target(
        url=(options.url or "").rstrip("/"),
        model=options.model or "",
        endpoint=options.endpoint,
        api_key=_key(options.api_key_env),
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        extra=_extra(options.extra_body),
        timeout_s=options.timeout,
    )
    form = "text" if options.endpoint == "chat" else "tokens"
    duration_s = options.duration
    if duration_s is None and options.num_requests is None:
        duration_s = DURATION_S
    setup = LoadSetup(
        target=target, label=options.label, dataset=dataset, mix=options.mix,
        trace=read_trace(file) if file is not None else [],
        trace_name=file.name if file is not None else "",
        input_tokens=options.input_len, output_tokens=options.output_len,
        form=form if options.prompt_form == "auto" else options.prompt_form, vocab=options.vocab,
        arrivals=options.arrivals, burstiness=options.burstiness,
        count=options.num_requests, duration_s=duration_s,
        limit=options.concurrency[0] if options.rate and options.concurrency else None,
        warmup=options.warmup, warmup_s=options.warmup_duration, seed=options.seed,
        slo=LatencySlo(ttft_s=_seconds(options.slo_ttft_ms), tpot_s=_seconds(options.slo_tpot_ms),
                e2e_s=_seconds(options.slo_e2e_ms)),
    )  # fmt: skip
    if options.rate:
        return setup, [LoadLevel(rate=rate) for rate in options.rate]
    if options.concurrency:
        return setup, [LoadLevel(concurrency=number) for number in options.concurrency]
    if dataset != "trace":
        raise UsageError(
            "neither --rate nor --concurrency is given",
            hint="--rate 5 for five requests per second, --concurrency 8 for eight at a time",
        )
    return setup, [LoadLevel()]


def check(options: BenchServe) -> None:
    """Refuse what cannot be meant."""
    _check_server(options)
    _check_numbers(options)
    _check_loads(options)
    if options.cold and options.find_rate:
        raise UsageError("--cold and --find-rate are given", hint="measure one --rate with --cold")
    if options.merge and options.out is None:
        raise UsageError("--merge is given without --out", hint="name the file with --out")
    if options.endpoint == "chat" and options.prompt_form == "tokens":
        raise UsageError("a chat takes no token ids", hint="use --endpoint completions")


def serve_args(options: BenchServe) -> list[str]:
    """Arguments of --start."""
    try:
        return shlex.split(options.start or "")
    except ValueError as error:
        raise UsageError(f"--start {options.start!r}: {error}", hint="close the quotes") from None


def _check_server(options: BenchServe) -> None:
    from cairn.core.server_address import place

    if (options.url is None) == (options.start is None):
        given = "neither --url nor --start is" if options.url is None else "--url and --start are"
        raise UsageError(
            f"{given} given",
            hint="--url http://127.0.0.1:8000 for a server that runs, --start MODEL for one of ours",
        )
    if options.url is not None:
        place(options.url)
    elif not serve_args(options):
        raise UsageError("--start is empty", hint='--start "random:tiny --device cpu"')


def _check_numbers(options: BenchServe) -> None:
    above = {"--duration": options.duration, "--num-requests": options.num_requests, "--input-len": options.input_len,
             "--output-len": options.output_len, "--timeout": options.timeout, "--vocab": options.vocab,
             "--warmup": options.warmup, "--burstiness": options.burstiness, "--slo-ttft-ms": options.slo_ttft_ms,
             "--slo-tpot-ms": options.slo_tpot_ms, "--slo-e2e-ms": options.slo_e2e_ms}  # fmt: skip
    for name, value in above.items():
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name} is {value}", hint="it is above 0")
    if not 0 <= options.warmup_duration < float("inf"):
        raise UsageError(f"--warmup-duration is {options.warmup_duration}", hint="at least 0")


def _check_loads(options: BenchServe) -> None:
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
    timeless = options.dataset[:1] == ["trace"] or float("inf") in options.rate[:1]
    if options.warmup_duration and timeless:
        raise UsageError(
            "--warmup-duration has no meaning for a trace or for all requests at once",
            hint="use --warmup for a number of requests",
        )
    if options.find_rate:
        _check_search(options)


def _check_search(options: BenchServe) -> None:
    from cairn.bench.load_search import check_bounds

    if (options.slo_ttft_ms, options.slo_tpot_ms, options.slo_e2e_ms) == (None, None, None):
        raise UsageError(
            "--find-rate without a limit to hold", hint="--slo-ttft-ms 500 --slo-tpot-ms 25"
        )
    if len(options.rate) not in (1, 2):
        raise UsageError(
            f"--find-rate with {len(options.rate)} rates", hint="--rate LOW HIGH, or --rate START"
        )
    low, high = options.rate[0], options.rate[1] if len(options.rate) == 2 else None
    check_bounds(low, high, options.resolution)


def _dataset(words: list[str]) -> "tuple[Dataset, Path | None]":
    match words:
        case [] | ["random"]:
            return "random", None
        case ["sharegpt-like"] | ["conversations"]:
            return "sharegpt-like", None
        case ["agents"]:
            return "agents", None
        case ["long"]:
            return "long", None
        case ["trace", file]:
            return "trace", Path(file)
        case ["trace"]:
            raise UsageError("--dataset trace without a file", hint="--dataset trace FILE")
    hint = did_you_mean(
        words[0], DATASETS, otherwise="random, sharegpt-like, agents, long or trace FILE"
    )
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
