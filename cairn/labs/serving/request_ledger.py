"""Where did the time of a request go? Every part has a name, and the parts add up.

    tokenize | queue | schedule | prefill | decode | respond        = end to end

A server whose device takes exactly so long for a step answers known questions: what comes out of the ledger has to be
what was put in. One row and three requests at once: the second and third wait for those before them.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

STEP_S = 0.02
PARTS = ("tokenize", "queue", "schedule", "prefill", "decode", "respond")


def run(bench: Workbench) -> Outcome:
    from cairn.labs.serving._server import get, paced, post

    tokens = bench.size("tokens")
    with paced(rows=1, step_s=STEP_S) as server:
        bench.step("one request alone")
        post(server.url, prompt="The first stone", max_tokens=2)  # warm
        post(server.url, prompt="A stone on a stone", max_tokens=tokens)
        bench.step("three at once, one row")
        with ThreadPoolExecutor(3) as pool:
            list(
                pool.map(
                    lambda n: post(server.url, prompt=f"Stone {n}", max_tokens=tokens), range(3)
                )
            )
        views = get(f"{server.url}/cairn/requests?limit=4")["requests"][::-1]  # oldest first
    rows, queues, gaps = [], [], []
    for view in views:
        parts = {span["name"]: span["seconds"] for span in view["spans"]}
        named = [parts.get(name, 0.0) * 1e3 for name in PARTS]
        rows.append([*named, view["e2e_s"] * 1e3])
        queues.append(parts.get("queue", 0.0))
        gaps.append(abs(sum(named) - view["e2e_s"] * 1e3))
    alone = views[0]
    queues[1:] = sorted(queues[1:])
    return Outcome(
        checks=_checks(gaps, alone, tokens, queues),
        table=Table(
            columns=[
                *(Words(f"{name}, ms", f"{name}（毫秒）") for name in PARTS),
                Words("whole, ms", "总计（毫秒）"),
            ],
            rows=rows,
        ),
        notes=[
            Words(
                f"The server's own word on the first: {alone['text_of_reason']}.",
                f"服务器对第一个请求的解释：{alone['text_of_reason']}。",
            )
        ],
    )


def _checks(gaps: list[float], alone: Any, tokens: int, queues: list[float]) -> list[Check]:
    return [
        Check(
            what=Words(
                "parts that do not add up to the whole, at most",
                "各部分之和与总时间之差（最多）",
            ),
            predicted=0.05,
            measured=max(gaps),
            unit="ms",
            kind="at_most",
        ),
        Check(
            what=Words("time between tokens, alone", "单独请求的 TPOT"),
            predicted=STEP_S * 1e3,
            measured=alone["tpot_s"] * 1e3,
            unit="ms",
            within=0.3,
        ),
        Check(
            what=Words("engine steps of the first request", "第一个请求的引擎步数"),
            predicted=tokens,
            measured=alone["steps"],
            unit="steps",
        ),
        Check(
            what=Words("queue of the third of three", "三个中最后一个的排队时间"),
            predicted=2 * tokens * STEP_S * 1e3,
            measured=queues[3] * 1e3,
            unit="ms",
            within=0.3,
        ),
    ]


LAB = described(__file__, run)
