import math

import torch

from cairn.labs.exercises.grading import Attempt, case, close, equal


@case("sums, products and tanh have the right values", "加、乘、tanh 的值正确")
def values(attempt: Attempt) -> None:
    a, b = attempt.Value(2.0), attempt.Value(-3.0)
    equal((a + b).data, -1.0)
    equal((a * b).data, -6.0)
    close(b.tanh().data, math.tanh(-3.0))


@case("slopes of one operation", "单个运算的梯度")
def slopes(attempt: Attempt) -> None:
    a, b = attempt.Value(2.0), attempt.Value(-3.0)
    (a * b).backward()
    equal((a.grad, b.grad), (-3.0, 2.0))
    c = attempt.Value(0.5)
    c.tanh().backward()
    close(c.grad, 1 - math.tanh(0.5) ** 2)


@case("a value that is used twice adds its gradients", "被使用两次的值梯度相加")
def shared(attempt: Attempt) -> None:
    a = attempt.Value(3.0)
    (a * a + a).backward()
    equal(a.grad, 7.0)


@case("a deep diamond agrees with torch.autograd", "多层菱形图与 torch.autograd 一致")
def diamond(attempt: Attempt) -> None:
    def chain(x, y):
        for _ in range(6):
            x, y = (x * y).tanh() + y, x + y * y
        return x * y

    a, b = attempt.Value(0.3), attempt.Value(-0.2)
    chain(a, b).backward()
    ta, tb = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.3, -0.2))
    wanted = torch.autograd.grad(chain(ta, tb), [ta, tb])
    close([a.grad, b.grad], [float(slope) for slope in wanted], 1e-9)


@case("40 doublings are not 2^40 visits", "40 层翻倍不会访问 2^40 次")
def linear_time(attempt: Attempt) -> None:
    visits = 0

    class Counted(attempt.Value):
        @property
        def inputs(self):
            nonlocal visits
            visits += 1
            if visits > 10_000:
                raise RecursionError("each node is visited once, not once for each path")
            return self.__dict__["_inputs"]

        @inputs.setter
        def inputs(self, given):
            self.__dict__["_inputs"] = given

    first = node = attempt.Value(1.0)
    for _ in range(40):
        node = Counted(2 * node.data, [(node, 1.0), (node, 1.0)])
    node.backward()
    equal(first.grad, 2.0**40)
