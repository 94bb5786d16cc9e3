"""The records of the H200 as one page of tables, with the peer's figure beside ours where there is one.

    python -m cairn.bench.overview benchmarks docs/benchmarks.md

Reads `benchmarks/h200/*.json` and writes the tables of docs/benchmarks.md; a test holds the page against the records,
so that no figure on it can be older than its file. Measures nothing.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

# What vLLM 0.23 and torchtitan 0.2.2 reached on the same kind of card with the same workloads.
VLLM = {
    ("qwen3-0.6b", "nano"): 23_121,
    ("qwen3-8b", "nano"): 9_042,
    ("qwen3-0.6b", "latency"): 431,
    ("qwen3-8b", "latency"): 193,
    ("qwen3-0.6b", "prefill"): 376_928,
    ("qwen3-8b", "prefill"): 41_480,
    ("qwen3-0.6b", "decode"): 18_521,
    ("qwen3-8b", "decode"): 5_748,
    ("qwen3-0.6b", "shared"): 13_861,
    ("qwen3-8b", "shared"): 5_069,
    ("qwen3-8b", "conversations"): 8_119,
    ("qwen3-8b", "brief"): 18_535,
    ("qwen3-8b", "books"): 96,
    ("qwen3-30b-a3b", "nano"): 5_725,
    ("qwen3-30b-a3b", "streams"): 1_148,
    ("qwen3-30b-a3b", "conversations"): 5_131,
    ("qwen3-30b-a3b", "document"): 194,
}
VLLM_FP8 = {  # weights in fp8, cache and head in bf16
    ("qwen3-8b", "nano"): 11_094,
    ("qwen3-8b", "conversations"): 10_122,
    ("qwen3-8b", "streams"): 3_005,
    ("qwen3-8b", "document"): 219,
}
FORM = ("quantization", "kv_cache", "head")  # of a row of throughput.json
TORCHTITAN = {("qwen3-0.6b", "bf16"): 90_000, ("qwen3-1.7b", "bf16"): 45_200}
BEGIN, END = "<!-- begin: tables -->", "<!-- end: tables -->"


def tables(folder: Path) -> str:
    """Every table, as Markdown."""
    parts = [
        _throughput(*_two_machines(folder, "throughput.json")),
        _serving(_read(folder / "h200/serve.json")),
        _training(*_two_machines(folder, "training.json")),
        _experts(_read(folder / "h200/experts.json")),
        _first_token(_read(folder / "h200/first_token.json")),
        _power(_read(folder / "h200/power_limit.json")),
    ]
    return "\n".join(parts)


def put_into(page: str, folder: Path) -> str:
    """The page with its tables renewed."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(folder)}{END}{after}"


def _two_machines(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record, and what another card of the same kind did; of which only rows count that were measured there."""
    return _read(folder / "h200" / name), _read(folder / "h200/another_machine" / name)


def _there(row: dict[str, Any], other: dict[str, Any], keys: Sequence[str], figure: str) -> str:
    for found in other["rows"]:
        if (
            all((found.get(key) or "") == (row.get(key) or "") for key in keys)
            and found["commit"] == other["commit"]
        ):
            return f"{found[figure]:,.0f}"
    return ""


def _form(row: dict[str, Any]) -> str:
    """Describe deviations from the model's dtype, and the drafter: "fp8, fp8 KV"."""
    names = ("", " KV", " head")
    parts = [row[part] + name for part, name in zip(FORM, names, strict=True) if row.get(part)]
    if row.get("speculate"):
        parts.append(f"{row['speculate']} drafts of length {row['acceptance_length']:.1f}")
    return ", ".join(parts)


def _throughput(record: dict[str, Any], other: dict[str, Any]) -> str:
    rows = []
    for row in sorted(record["rows"], key=lambda row: (row["shape"], _form(row), row["workload"])):
        prefill = row["workload"] == "prefill"
        figure = "input_tokens_per_s" if prefill else "output_tokens_per_s"
        ours = row[figure]
        peers = {"": VLLM, "fp8": VLLM_FP8}.get(_form(row), {})  # only those of the same form
        peer = peers.get((row["shape"], row["workload"]))
        rows.append(
            [
                ", ".join(filter(None, (row["shape"], _form(row)))),
                row["workload"] + (" (prompt)" if prefill else ""),
                f"{ours:,.0f}",
                _there(row, other, ("shape", "workload", "dtype", "speculate", *FORM), figure),
                f"{peer:,}" if peer else "",
                f"{ours / peer:.2f}x" if peer else "",
                f"{row['fraction_of_limit']:.0%}",
                f"{row['first_of_warm']:.1%}" if row.get("first_of_warm") else "",
                _commit(row, record),
            ]
        )
    heads = [
        "shape",
        "workload",
        "tokens/s",
        "another machine",
        "vLLM 0.23",
        "ratio",
        "of the roofline",
        "first run / warm",
        "commit",
    ]
    return _titled("Serving: whole workloads", "cairn bench throughput", heads, rows)


def _serving(record: dict[str, Any]) -> str:
    rows = [
        [
            row["shape"],
            row["load"],
            f"{row['requests_per_s']:.1f}",
            f"{_ms(row, 'ttft')}",
            f"{_ms(row, 'tpot')}",
            _commit(row, record),
        ]
        for row in record["rows"]
    ]
    heads = ["shape", "load", "requests/s", "p99 TTFT ms", "p99 TPOT ms", "commit"]
    return _titled("Serving: 1,024 tokens in, 128 out, over HTTP", "cairn bench serve", heads, rows)


def _training(record: dict[str, Any], other: dict[str, Any]) -> str:
    rows = []
    for row in record["rows"]:
        ours, peer = row["tokens_per_s"], TORCHTITAN.get((row["model"], row["dtype"]))
        rows.append(
            [
                row["model"] + (f", {row['layers']} layers" if row.get("layers") else ""),
                row["dtype"],
                f"{ours:,.0f}",
                _there(row, other, ("model", "dtype"), "tokens_per_s"),
                f"{row['mfu']:.1%}",
                f"{row['peak_gib']:.1f}",
                f"{row['predicted_gib']:.1f}",
                f"{peer:,}" if peer else "",
                f"{ours / peer:.2f}x" if peer else "",
                _commit(row, record),
            ]
        )
    heads = [
        "model",
        "dtype",
        "tokens/s",
        "another machine",
        "MFU",
        "GiB",
        "GiB predicted",
        "torchtitan 0.2.2",
        "ratio",
        "commit",
    ]
    return _titled("Training: sequence 4,096, batch 8", "cairn bench train", heads, rows)


def _experts(record: dict[str, Any]) -> str:
    results = record["results"]
    rows = [
        [
            f"{row['tokens']:,}",
            row["routing"],
            f"{row['us']:,.0f}",
            f"{row['floor_us']:,.0f}",
            f"{row['of_floor']:.0%}",
            _commit(row, record),
        ]
        for row in results["serving"]
    ]
    heads = ["tokens", "routing", "us", "floor us", "of the floor", "commit"]
    title = f"One layer of experts: {results['shape']}, bf16"
    return _titled(title, "python benchmarks/experts.py", heads, rows)


def _first_token(record: dict[str, Any]) -> str:
    rows = [
        [str(number), *(f"{start[key]:.1f}" for key in sorted(start) if key.endswith("_s"))]
        for number, start in enumerate(record["results"]["starts"], start=1)
    ]
    first = record["results"]["starts"][0]
    names = [
        key.removesuffix("_s").replace("_", " ") for key in sorted(first) if key.endswith("_s")
    ]
    title = f"From start to first token: {record['results']['shape']}, seconds"
    return _titled(title, "python benchmarks/first_token.py", ["start", *names], rows)


def _power(record: dict[str, Any]) -> str:
    rows = [
        [
            row["shape"],
            row["kernel"],
            row["numbers"],
            f"{row['tflops']:.0f}",
            f"{row['mhz']:,.0f}",
            f"{row['watts']:.0f}",
        ]
        for row in record["results"]["rows"]
    ]
    heads = ["product", "kernel", "numbers", "TFLOP/s", "MHz", "W"]
    first = record["results"]["rows"][0]
    title = f"What products wait for: at most {first['most_mhz']:,.0f} MHz and {first['limit_watts']:.0f} W"
    return _titled(title, "python benchmarks/power_limit.py", heads, rows)


def _ms(row: dict[str, Any], name: str) -> str:
    return f"{row[f'{name}_ms']['p99']:.0f}" if f"{name}_ms" in row else ""


def _commit(row: dict[str, Any], record: dict[str, Any]) -> str:
    return f"`{(row.get('commit') or record['commit'])[:9]}`"


def _titled(title: str, command: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"### {title}", "", f"`{command}`", "", f"| {' | '.join(heads)} |"]
    lines.append("|" + "---|" * len(heads))
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _read(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes())


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.write_text(put_into(target.read_text(), source))
