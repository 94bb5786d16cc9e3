from cairn.labs.exercises.grading import Attempt, case, close, equal


@case("the dominant share is the larger one", "主导份额取较大者")
def dominant(attempt: Attempt) -> None:
    close(attempt.dominant_share((2, 8), (9, 18), 1.0), 8 / 18)
    close(attempt.dominant_share((6, 2), (9, 18), 2.0), 1 / 3)


@case("the example of the paper: 3 and 2 tasks", "论文中的例子：3 与 2 个任务")
def paper(attempt: Attempt) -> None:
    users = [attempt.User("a", (1, 4)), attempt.User("b", (3, 1))]
    equal(attempt.allocate(users, (9, 18)), {"a": 3, "b": 2})


@case("one resource is plain fair sharing", "单一资源即普通公平共享")
def plain(attempt: Attempt) -> None:
    users = [attempt.User(name, (1, 0)) for name in "abc"]
    equal(attempt.allocate(users, (9, 1)), {"a": 3, "b": 3, "c": 3})


@case("weights count", "权重生效")
def weighted(attempt: Attempt) -> None:
    users = [attempt.User("a", (1, 0), 2.0), attempt.User("b", (1, 0), 1.0)]
    equal(attempt.allocate(users, (9, 1)), {"a": 6, "b": 3})


@case("a task that does not fit is passed over", "放不下的任务被跳过")
def passed(attempt: Attempt) -> None:
    users = [attempt.User("large", (6, 1)), attempt.User("small", (1, 1))]
    equal(attempt.allocate(users, (9, 100)), {"large": 1, "small": 3})
