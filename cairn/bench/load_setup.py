"""Setup of a load test, and the requests that follow from it.

    Setup (whom, what, how long) + Load (a rate, or so many at a time) -> when each request is due, what it asks

Pure: the same setting gives the same requests.
"""

import math
import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from cairn.bench import arrivals, load_prompts
from cairn.bench.arrival_traces import TracedRequest
from cairn.bench.arrivals import Kind
from cairn.bench.load_client import Target
from cairn.bench.load_mix import Mix, fields
from cairn.bench.load_prompts import LoadRequest
from cairn.bench.load_stats import LatencySlo

Dataset = Literal["random", "sharegpt-like", "agents", "long", "trace"]


class LoadSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Workload of a load test without its rate."""

    target: Target
    label: str = "server"
    dataset: Dataset = "random"
    mix: Mix = "none"
    trace: list[TracedRequest] = []
    trace_name: str = ""
    input_tokens: int | None = None  # of random; the most of the others
    output_tokens: int | None = None
    form: load_prompts.Form = "tokens"
    vocab: int = load_prompts.LARGEST_VOCAB
    arrivals: Kind = "poisson"
    burstiness: float = 1.0
    count: int | None = None
    duration_s: float | None = None
    limit: int | None = None  # requests in flight, with a rate
    warmup: int = 4  # requests
    warmup_s: float = 0.0  # after them: the first load for so long, which does not count
    slo: LatencySlo = LatencySlo()
    seed: int = 0


class LoadLevel(NamedTuple):
    """A rate, or so many at a time; neither: a trace at its own speed."""

    rate: float | None = None
    concurrency: int | None = None


def describe(load: LoadLevel, setup: LoadSetup) -> str:
    if load.concurrency is not None:
        return f"{load.concurrency} at a time"
    most = f", {setup.limit} at most" if setup.limit is not None else ""
    if load.rate == math.inf:
        return f"all at once{most}"
    if setup.dataset == "trace":
        return (f"{load.rate:g}/s as traced" if load.rate else "as traced") + most
    shape = f" {setup.burstiness:g}" if setup.arrivals == "gamma" else ""
    return f"{load.rate:g}/s {setup.arrivals}{shape}{most}"


def workload(setup: LoadSetup) -> str:
    """Description of the workload. Rows with equal description, load and label belong to the same test."""
    limits = {"in": setup.input_tokens, "out": setup.output_tokens}
    if setup.dataset == "random":
        limits = {
            "in": setup.input_tokens or load_prompts.INPUT_TOKENS,
            "out": setup.output_tokens or load_prompts.OUTPUT_TOKENS,
        }
    most = "" if setup.dataset == "random" else "at most "
    sizes = [f"{most}{limit} {way}" for way, limit in limits.items() if limit is not None]
    name = f"trace {setup.trace_name}" if setup.dataset == "trace" else setup.dataset
    chat = ["chat"] if setup.target.endpoint == "chat" else []
    mix = [setup.mix] if setup.mix != "none" else []
    return ", ".join([name, *sizes, *chat, *mix])


def due_times(setup: LoadSetup, load: LoadLevel) -> list[float] | None:
    """When each request comes; None in a closed loop."""
    if load.concurrency is not None:
        return None
    if setup.dataset == "trace":
        own = [request.at_s for request in setup.trace]
        if load.rate is not None:
            own = arrivals.at_rate(own, load.rate)
        return arrivals.cut(own, setup.count, setup.duration_s)
    assert load.rate is not None
    return arrivals.times(
        setup.arrivals,
        load.rate,
        random.Random(f"arrivals {setup.seed}"),
        shape=setup.burstiness,
        count=setup.count,
        duration_s=setup.duration_s,
    )


def prompts(setup: LoadSetup, place: int) -> Iterator[LoadRequest]:
    """The requests of a point of a sweep; each point has different prompts."""
    asked = load_prompts.asks(_shapes(setup), setup.form, setup.vocab, f"{setup.seed} {place}")
    more = fields(setup.mix, setup.target.endpoint)
    return (ask._replace(fields=own) for ask, own in zip(asked, more, strict=False))


def _shapes(setup: LoadSetup) -> Iterator[load_prompts.PromptShape]:
    most_in, most_out = setup.input_tokens, setup.output_tokens
    generator = random.Random(f"lengths {setup.seed}")
    match setup.dataset:
        case "trace":
            return load_prompts.traced_shapes(setup.trace, most_in, most_out)
        case "agents":
            return load_prompts.agent_shapes(generator, most_in, most_out)
        case "long":
            return load_prompts.document_shapes(generator, most_in, most_out)
        case "sharegpt-like":
            longest = load_prompts.LONGEST
            return load_prompts.chat_shapes(generator, most_in or longest, most_out or longest)
    return load_prompts.random_shapes(
        most_in or load_prompts.INPUT_TOKENS, most_out or load_prompts.OUTPUT_TOKENS
    )
