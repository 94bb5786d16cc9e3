from cairn.labs.exercises.grading import Attempt, Figure, case, equal, require


def run(attempt: Attempt, stages: int, microbatches: int, backward: int = 2) -> int:
    """The time at which the last stage ends; a forward takes 1, a backward 2. Raises where no stage can go on."""
    remaining = [list(attempt.one_f_one_b(s, stages, microbatches)) for s in range(stages)]
    free, ended_at = [0] * stages, {}
    while any(remaining):
        before = sum(map(len, remaining))
        for s, actions in enumerate(remaining):
            while actions:
                kind, m = actions[0]
                needs = [(s - 1, "F", m)] if kind == "F" else [(s, "F", m), (s + 1, "B", m)]
                needs = [need for need in needs if 0 <= need[0] < stages]
                if any(need not in ended_at for need in needs):
                    break
                begin = max([free[s], *(ended_at[need] for need in needs)])
                free[s] = ended_at[s, kind, m] = begin + (1 if kind == "F" else backward)
                actions.pop(0)
        require(
            sum(map(len, remaining)) < before,
            "the stages wait for one another",
            "各阶段互相等待（死锁）",
        )
    return max(free)


@case("every micro-batch goes forward and back once", "每个微批前向、反向各一次")
def complete(attempt: Attempt) -> None:
    for stages, microbatches in ((1, 3), (4, 8), (4, 2)):
        for stage in range(stages):
            actions = attempt.one_f_one_b(stage, stages, microbatches)
            for kind in "FB":
                equal(sorted(m for k, m in actions if k == kind), list(range(microbatches)))


@case("the stages never wait for one another in a circle", "各阶段不会互相死等")
def no_deadlock(attempt: Attempt) -> None:
    for stages in range(1, 6):
        for microbatches in range(1, 9):
            run(attempt, stages, microbatches)


@case("time of 4 stages and 12 micro-batches", "4 阶段、12 微批的耗时")
def bubble(attempt: Attempt) -> Figure:
    return Figure(run(attempt, 4, 12), (12 + 3) * 3, "units")


@case("activations that stage 0 holds", "阶段 0 同时保存的激活")
def held(attempt: Attempt) -> Figure:
    now = most = 0
    for kind, _ in attempt.one_f_one_b(0, 4, 12):
        now += 1 if kind == "F" else -1
        most = max(most, now)
    return Figure(most, 4, "micro-batches")
