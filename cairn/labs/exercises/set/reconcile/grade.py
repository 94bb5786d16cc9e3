from cairn.labs.exercises.grading import Attempt, case, equal, require


@case("missing pods are created, extra ones deleted", "补建缺少的、删除多余的")
def size(attempt: Attempt) -> None:
    job = attempt.Job("j", 3, 2)
    equal(sorted(attempt.reconcile(job, {})), [("create", f"j-{n}") for n in range(3)])
    equal(attempt.reconcile(job, {"j-0": "Running", "j-2": "Pending"}), [("create", "j-1")])
    equal(attempt.reconcile(job, {f"j-{n}": "Running" for n in range(4)}), [("delete", "j-3")])


@case("nothing to do is nothing done", "一切正常时不动作")
def idempotent(attempt: Attempt) -> None:
    equal(attempt.reconcile(attempt.Job("j", 2, 2), {"j-0": "Running", "j-1": "Pending"}), [])
    equal(attempt.reconcile(attempt.Job("j", 2, 2), {"j-0": "Running", "j-1": "Succeeded"}), [])


@case(
    "a failed rank restarts the gang, until restarts are used up",
    "一个失败则整组重启，次数用完则失败",
)
def failure(attempt: Attempt) -> None:
    pods = {"j-0": "Failed", "j-1": "Running"}
    actions = attempt.reconcile(attempt.Job("j", 2, 1), pods)
    equal(sorted(actions), [("delete", "j-0"), ("delete", "j-1"), ("restart", "")])
    over = attempt.reconcile(attempt.Job("j", 2, 1, restarts=1), pods)
    require(
        ("status", "Failed") in over and ("restart", "") not in over, f"got {over}", f"得到 {over}"
    )


@case("success and deletion", "成功与删除")
def ends(attempt: Attempt) -> None:
    pods = {"j-0": "Succeeded", "j-1": "Succeeded"}
    equal(attempt.reconcile(attempt.Job("j", 2, 1), pods), [("status", "Succeeded")])
    equal(
        sorted(attempt.reconcile(attempt.Job("j", 2, 1, deleting=True), pods)),
        [("delete", "j-0"), ("delete", "j-1")],
    )


@case("from any state it comes to rest", "从任意状态都会收敛")
def converges(attempt: Attempt) -> None:
    for start in ({}, {"j-5": "Running"}, {"j-0": "Failed"}, {"j-1": "Succeeded", "j-0": "Failed"}):
        pods, restarts = dict(start), 0
        for _ in range(6):
            actions = attempt.reconcile(attempt.Job("j", 2, 3, restarts), pods)
            for kind, name in actions:
                restarts += kind == "restart"
                if kind == "create":
                    pods[name] = "Running"
                elif kind == "delete":
                    pods.pop(name)
            if not actions:
                break
        equal(pods, {"j-0": "Running", "j-1": "Running"})
