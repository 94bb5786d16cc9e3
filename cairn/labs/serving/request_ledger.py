"""Where did the time of a request go? Every part has a name, and the parts add up.

    tokenize | queue | schedule | prefill | decode | respond        = end to end

A server whose device takes exactly so long for a step answers known questions: what comes out of the ledger has to be
what was put in. One row and three requests at once: the second and third wait for those before them.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.workbench import Workbench

STEP_S = 0.02
PARTS = ("tokenize", "queue", "schedule", "prefill", "decode", "respond")


def run(bench: Workbench) -> Outcome:
    from cairn.labs.serving._server import get, paced, post

    tokens = bench.pick(40, 12)
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
        seen = get(f"{server.url}/cairn/requests?limit=4")["requests"][::-1]  # oldest first
    rows, queues, gaps = [], [], []
    for view in seen:
        parts = {span["name"]: span["seconds"] for span in view["spans"]}
        named = [parts.get(name, 0.0) * 1e3 for name in PARTS]
        rows.append([*named, view["e2e_s"] * 1e3])
        queues.append(parts.get("queue", 0.0))
        gaps.append(abs(sum(named) - view["e2e_s"] * 1e3))
    alone = seen[0]
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


LAB = Lab(
    name="request-ledger",
    area="serving",
    title=Words("One request, every millisecond named", "一个请求：每一毫秒都有名字"),
    hypothesis=Words(
        "The six parts of a request add up to its whole time; a device of 20 ms a step shows as TPOT 20 ms, and "
        "with one row the third of three simultaneous requests queues for exactly the two before it.",
        "请求的六个部分之和等于总时间；每步 20 毫秒的设备表现为 TPOT 20 毫秒；只有一行时，"
        "三个并发请求中的第三个恰好排队等待前两个。",
    ),
    run=run,
    causes=(
        Words(
            "the machine is busy: threads wake late, and each token a little later",
            "机器繁忙：线程唤醒变慢，每个 token 都略晚",
        ),
        Words("the requests did not arrive together", "三个请求没有同时到达"),
    ),
    code=(
        "cairn/serve/http/ledger/entry.py:Entry",
        "cairn/serve/http/ledger/reason.py:reason_of",
        "cairn/serve/engine/request.py:Ledger",
        "cairn/bench/paced_engine.py:PacedRunner",
    ),
    reading=("Dapper, a Large-Scale Distributed Systems Tracing Infrastructure (2010)",),
    questions=(
        Question(
            Words(
                "TTFT doubled, TPOT did not. Where do you look?",
                "TTFT 翻倍而 TPOT 没变，先看哪里？",
            ),
            Words(
                "Queue and prefill: longer prompts, fewer prefix hits, or too few rows or pages. Decode is healthy, "
                "so it is not the device's bandwidth.",
                "看 queue 和 prefill：prompt 变长、前缀命中率下降，或行/页不够。decode 正常，说明不是设备带宽问题。",
            ),
        ),
        Question(
            Words("Why must the parts add up?", "为什么各部分必须加得起来？"),
            Words(
                "A remainder is time nobody owns, and that is where tails hide; with a remainder of zero the "
                "largest part is the cause.",
                "加不起来的剩余就是无人负责的时间，长尾往往藏在那里；没有剩余时，最大的部分就是原因。",
            ),
        ),
        Question(
            Words("Which parts can be reduced by a faster GPU?", "更快的 GPU 能缩短哪些部分？"),
            Words(
                "Prefill and decode, and through them queue. Tokenize, schedule, detokenize and respond are the "
                "host's: at 1 ms a step they soon are the larger half.",
                "prefill 和 decode，并间接缩短 queue。tokenize、schedule、detokenize、respond 属于主机；当一步只有 "
                "1 毫秒时它们很快占大头。",
            ),
        ),
    ),
    seconds=4.0,
)
