from cairn.labs.exercises.grading import Attempt, Figure, case, equal, require


@case("jobs that fit start in order, whole", "放得下的作业按序整体启动")
def in_order(attempt: Attempt) -> None:
    jobs = [attempt.Job("a", 4, 10), attempt.Job("b", 3, 10), attempt.Job("c", 2, 10)]
    equal(attempt.start(0, 8, [], jobs), ["a", "b"])
    equal(jobs[0].name, "a")


@case("a short job fills the gap before the reservation", "短作业填补预留前的空隙")
def fills(attempt: Attempt) -> None:
    running = [attempt.Running(6, 100)]
    jobs = [attempt.Job("large", 8, 50), attempt.Job("short", 2, 90), attempt.Job("long", 2, 200)]
    equal(attempt.start(0, 8, running, jobs), ["short"])


@case("extra GPUs may be used past it, once", "多余的 GPU 可越过预留，但只能用一次")
def extra(attempt: Attempt) -> None:
    running = [attempt.Running(6, 100)]
    jobs = [attempt.Job("large", 6, 50), attempt.Job("x", 2, 500), attempt.Job("y", 2, 500)]
    equal(attempt.start(0, 10, running, jobs), ["x", "y"])
    jobs = [attempt.Job("large", 7, 50), attempt.Job("x", 2, 500), attempt.Job("y", 2, 500)]
    equal(attempt.start(0, 10, running, jobs), ["x"])


def simulate(attempt: Attempt, gpus, jobs):
    """Times at which each job began; every job arrives at 0 and takes as long as it said."""
    waiting, running, now, began = list(jobs), [], 0.0, {}
    while waiting:
        for name in attempt.start(now, gpus, [one for _, one in running], waiting):
            job = next(one for one in waiting if one.name == name)
            waiting.remove(job)
            running.append((name, attempt.Running(job.gpus, now + job.seconds)))
            began[name] = now
        used = sum(one.gpus for _, one in running)
        require(used <= gpus, f"{used} of {gpus} GPUs are used", f"用了 {used}/{gpus} 个 GPU")
        require(running, "nothing runs and jobs wait", "有作业等待却无人运行")
        now = min(one.end for _, one in running)
        running = [(name, one) for name, one in running if one.end > now]
    return began


@case("the large job is never delayed by later ones", "大作业不被后来者推迟")
def no_delay(attempt: Attempt) -> None:
    jobs = [attempt.Job("first", 6, 10), attempt.Job("large", 8, 10)]
    jobs += [attempt.Job(f"s{n}", 1, 3 + 4 * n) for n in range(8)]
    equal(simulate(attempt, 8, jobs)["large"], 10.0)


@case("time until all have ended", "全部完成的时间")
def makespan(attempt: Attempt) -> Figure:
    jobs = [attempt.Job(str(n), 1 + 5 * (n % 3) % 8, 5.0 + n % 4) for n in range(18)]
    began = simulate(attempt, 8, jobs)
    end = max(began[job.name] + job.seconds for job in jobs)
    return Figure(end, sum(job.gpus * job.seconds for job in jobs) / 8, "s", allowed=1.5)
