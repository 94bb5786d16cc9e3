"""Tasks judge their own solutions right, and nothing else."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cairn.align.config import Align, Task
from cairn.align.tasks import make_problem, reward_of, worked_out
from cairn.core.config import load

KINDS = ["sorting", "arithmetic", "largest", "countdown", "format"]


@given(st.sampled_from(KINDS), st.integers(0, 1 << 45), st.integers(2, 6))
def test_solutions_are_right(kind, number, numbers):
    task = Task(kind=kind, numbers=numbers)
    problem = make_problem(task, 3, number)
    assert problem == make_problem(task, 3, number)
    assert reward_of(task, problem, problem.solution) == 1.0
    assert reward_of(task, problem, "") == 0.0
    assert make_problem(task, 3, number, held_out=True).prompt != problem.prompt


@given(st.sampled_from(KINDS), st.text(max_size=60))
@example("countdown", "9" * 5000)
def test_any_text_is_judged(kind, text):
    task = Task(kind=kind)
    assert 0.0 <= reward_of(task, make_problem(task, 0, 1), text) <= 1.0


def test_partly_right():
    task = Task(kind="format")
    problem = make_problem(task, 0, 5)
    assert reward_of(task, problem, "<answer>none</answer>") == 0.5
    assert reward_of(task, problem, f"{problem.key}") == 0.0
    task = Task(kind="countdown", numbers=3)
    problem = make_problem(task, 0, 5)
    target = problem.key.split()[0]
    assert reward_of(task, problem, target) == 0.0  # none of the numbers
    assert reward_of(task, problem, f"{problem.solution} + 0") == 0.0


@pytest.mark.parametrize(
    "text", ["2 ** 9", "__import__('os')", "1 / 0", "(" * 150, "9" * 300, "True + 1", "a", "1 +"]
)
def test_what_is_no_sum_has_no_value(text):
    assert worked_out(text) is None


def test_sums_are_exact():
    assert worked_out("(1 / 3) * 3") == 1


def test_the_recipe_of_smollm2_is_read():
    file = Path(__file__).parents[2] / "examples/smollm2/largest.toml"
    recipe = load(Align, args=[], env_prefix="CAIRN_ALIGN_", file=file).value
    problem = make_problem(recipe.task, 0, 0)
    assert reward_of(recipe.task, problem, problem.solution) == 1.0
    assert recipe.data.sequences // recipe.rollout.group == 32
