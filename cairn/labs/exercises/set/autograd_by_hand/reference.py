"""A scalar that remembers how it was computed."""

import math
from collections.abc import Sequence


class Value:
    def __init__(self, data: float, inputs: "Sequence[tuple[Value, float]]" = ()) -> None:
        self.data = data
        self.grad = 0.0
        self.inputs = list(inputs)  # (input, slope of this value with respect to it)

    def __add__(self, other: "Value") -> "Value":
        # begin answer
        return Value(self.data + other.data, [(self, 1.0), (other, 1.0)])
        # end answer

    def __mul__(self, other: "Value") -> "Value":
        # begin answer
        return Value(self.data * other.data, [(self, other.data), (other, self.data)])
        # end answer

    def tanh(self) -> "Value":
        # begin answer
        t = math.tanh(self.data)
        return Value(t, [(self, 1.0 - t * t)])
        # end answer

    def backward(self) -> None:
        """Adds d(self)/d(x) to `grad` of every x that this value was made from."""
        # begin answer
        order: list[Value] = []
        seen: set[int] = set()

        def visit(node: Value) -> None:
            if id(node) in seen:
                return
            seen.add(id(node))
            for parent, _ in node.inputs:
                visit(parent)
            order.append(node)

        visit(self)
        self.grad += 1.0
        for node in reversed(order):
            for parent, slope in node.inputs:
                parent.grad += slope * node.grad
        # end answer
