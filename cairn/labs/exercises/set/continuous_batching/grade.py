from cairn.labs.exercises.grading import Attempt, Figure, case, equal, require


def drive(attempt: Attempt, sizes, budget: int, seats: int) -> list[list[tuple[str, int]]]:
    waiting = [attempt.Request(str(number), *size) for number, size in enumerate(sizes)]
    running, steps = [], []
    while waiting or running:
        steps.append(attempt.step(waiting, running, budget, seats))
        require(steps[-1], "a step computes nothing while requests wait", "有请求等待却什么都没算")
        require(len(steps) < 10_000, "it never ends", "永远不结束")
        require(
            len(running) <= seats,
            f"{len(running)} run, {seats} may",
            f"运行 {len(running)} 个，上限 {seats}",
        )
    return steps


@case(
    "every prompt is read and every token made, exactly", "每个 prompt 恰好读完、token 恰好生成完"
)
def exact(attempt: Attempt) -> None:
    sizes = [(5, 3), (40, 1), (1, 7), (16, 4)]
    steps = drive(attempt, sizes, 16, 3)
    for number, (prompt, wanted) in enumerate(sizes):
        equal(
            sum(count for step in steps for name, count in step if name == str(number)),
            prompt + wanted - 1,
        )


@case("no step exceeds the budget", "每步不超预算")
def budget(attempt: Attempt) -> None:
    for step in drive(attempt, [(100, 4), (30, 9), (7, 2)], 24, 8):
        total = sum(count for _, count in step)
        require(
            total <= 24, f"{total} tokens in a step of 24", f"预算 24 的一步有 {total} 个 token"
        )


@case("requests that decode are not held up by a long prompt", "长 prompt 不会拖住正在解码的请求")
def decode_first(attempt: Attempt) -> None:
    steps = drive(attempt, [(4, 10), (200, 1)], 16, 8)
    first = [step for step in steps if any(name == "0" for name, _ in step)]
    equal(steps[:10], first)
    equal(first[1][0], ("0", 1))


@case("a request leaves when it is done, and the next one enters", "完成即离开，下一个立即进入")
def leaves(attempt: Attempt) -> None:
    steps = drive(attempt, [(1, 1), (1, 20), (1, 1), (1, 1)], 8, 2)
    equal(
        [
            next(at for at, step in enumerate(steps) if any(n == who for n, _ in step))
            for who in "0123"
        ],
        [0, 0, 1, 2],
    )


@case("steps for 24 mixed requests", "24 个混合请求的步数")
def steps(attempt: Attempt) -> Figure:
    sizes = [(10 + 7 * (n % 5), 5 + 11 * (n % 4)) for n in range(24)]
    total = sum(prompt + wanted - 1 for prompt, wanted in sizes)
    return Figure(
        len(drive(attempt, sizes, 32, 8)),
        max(total / 32, sum(w for _, w in sizes) / 8),
        "steps",
        allowed=1.45,
    )
