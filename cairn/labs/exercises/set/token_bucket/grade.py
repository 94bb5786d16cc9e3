from cairn.labs.exercises.grading import Attempt, Figure, case, close, equal, require


@case("a burst passes, the next one waits", "突发通过，下一个等待")
def burst(attempt: Attempt) -> None:
    bucket = attempt.TokenBucket(10.0, 5.0, 0.0)
    equal([bucket.take(1, 0.0) for _ in range(5)], [0.0] * 5)
    close(bucket.take(1, 0.0), 0.1)
    close(bucket.take(1, 0.05), 0.05)


@case("the wait that is told is enough, and no longer than needed", "告知的等待恰好足够")
def told(attempt: Attempt) -> None:
    bucket = attempt.TokenBucket(2.0, 10.0, 0.0)
    bucket.take(9, 0.0)
    wait = bucket.take(4, 0.0)
    close(wait, 1.5)
    require(bucket.take(4, wait - 0.01) > 0, "it passed too early", "过早通过")
    equal(bucket.take(4, wait + 1e-6), 0.0)


@case("idle time saves up to the burst only", "空闲最多攒到突发上限")
def idle(attempt: Attempt) -> None:
    bucket = attempt.TokenBucket(10.0, 5.0, 0.0)
    equal(bucket.take(5, 100.0), 0.0)
    require(bucket.take(1, 100.0) > 0, "more than the burst passed", "通过量超过突发上限")


@case("a clock that jumps back takes nothing away", "时钟回拨不扣令牌")
def backwards(attempt: Attempt) -> None:
    bucket = attempt.TokenBucket(1.0, 5.0, 100.0)
    equal(bucket.take(3, 50.0), 0.0)
    equal(bucket.take(2, 100.0), 0.0)


@case("what never fits is refused at once", "永远放不下的请求立即拒绝")
def never(attempt: Attempt) -> None:
    bucket = attempt.TokenBucket(1.0, 5.0, 0.0)
    try:
        bucket.take(6, 0.0)
    except ValueError:
        return
    require(False, "a cost above the burst raises ValueError", "超过 burst 应抛 ValueError")


@case("accepted in 60 s by a greedy client", "贪婪客户端 60 秒内的通过量")
def rate(attempt: Attempt) -> Figure:
    bucket, passed = attempt.TokenBucket(7.0, 20.0, 0.0), 0
    for tick in range(6000):
        passed += bucket.take(1, tick / 100) == 0.0
    require(passed >= 439, f"only {passed} passed", f"只通过了 {passed} 个")
    return Figure(passed, 20 + 7 * 60, "requests")
