"""What a request may ask for: everything that cannot be served is refused at once, with numbers."""

import contextlib
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import RequestError
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.request_checks import check_request
from cairn.serve.engine.sampling_params import INSTEAD, SamplingParams

LIMITS = Limits(rows=4, step_tokens=64, context=100, pages=11, page_size=8, vocabulary=1000)

WRONG = {
    "n": [0, -1, 10**9, 1.5, "2", True, None],
    "temperature": [-0.1, math.nan, math.inf, 1e30, "hot", None, True],
    "top_p": [0, -1, 1.01, math.nan, "1"],
    "top_k": [-2, 1.5, 10**12, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan, math.inf],
    "frequency_penalty": [-2.1, 2.1, -math.inf],
    "repetition_penalty": [0, -1, math.nan, math.inf],
    "seed": [-(2**63) - 1, 2**63, 1.0, "x"],
    "stop": ["", ["a", ""], [3], 7],
    "stop_token_ids": [[-1], ["a"], 3, [1.0], [2**31]],
    "ignore_eos": [1, None, "yes"],
    "max_tokens": [0, -5, 2**31, 1.5],
    "min_tokens": [-1, 17, 2**40, None],
    "logprobs": [-1, 21, 1.0],
    "prompt_logprobs": [-1, 21],
    "logit_bias": [{-1: 0.0}, {3: 101.0}, {3: math.nan}, {"a": 1.0}, [1]],
    "skip_special_tokens": ["no"],
    "include_stop_str_in_output": [0],
    "pooling": ["median", 1, "", True],
    "structured_outputs": ["json", 1, ["a"], True],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_wrong_values_are_named_and_answered_with_what_would_be_right(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.hint
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["max_tokens", "seed", "temperature", "stop"])
def test_a_number_too_long_to_print_is_still_an_answer(name):
    for value in (10**5000, [10**5000]):
        with pytest.raises(RequestError, match=f"{name} is a huge"):
            SamplingParams(**{name: value})


def test_every_parameter_has_a_wrong_value_in_this_file():
    assert set(WRONG) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("foo", "there are: n, temperature"), ("max_token", "max_tokens"), ("best_of", "n answers")],
)
def test_an_unknown_argument_is_refused_by_name(name, hint):
    with pytest.raises(RequestError, match=f"no argument '{name}'") as caught:
        SamplingParams(**{name: 1})
    assert hint in (caught.value.hint or "")
    with pytest.raises(RequestError, match="given 5 without a name"):
        SamplingParams(5)
    with pytest.raises(msgspec.ValidationError, match="best_of"):
        msgspec.json.decode(b'{"best_of": 2}', type=SamplingParams)


def test_what_takes_the_place_of_other_names_is_not_a_name_itself():
    assert not set(INSTEAD) & set(SamplingParams.__struct_fields__)


def test_one_spelling_of_each_meaning():
    assert SamplingParams(stop="x").stop == ["x"]
    assert SamplingParams(stop=None, stop_token_ids=None).stop == []  # pyrefly: ignore
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-5).seed == 2**63 - 5  # OpenAI's seeds may be negative
    assert SamplingParams(seed=-(2**63)).seed == 0
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy


def test_the_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.skip_special_tokens, params.include_stop_str_in_output) == (True, False)


def test_parameters_survive_the_wire():
    params = SamplingParams(stop=["a"], logit_bias={7: -1.5}, seed=3, max_tokens=None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    with pytest.raises(RequestError, match="temperature"):
        msgspec.json.decode(b'{"temperature": -1}', type=SamplingParams)


@given(
    st.dictionaries(
        st.sampled_from(sorted(WRONG)), st.from_type(object) | st.floats() | st.integers()
    )
)
def test_anything_else_is_either_taken_or_a_request_error(fields):
    with contextlib.suppress(RequestError):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("prompt", "params", "numbers"),
    [
        ([], {}, ["empty"]),
        ([1] * 100, {}, ["100 tokens", "context is 100"]),
        ([1] * 200, {"max_tokens": None}, ["200 tokens", "context is 100"]),
        ([1] * 60, {"max_tokens": 41}, ["60", "41", "100"]),
        ([1] * 60, {"max_tokens": None, "min_tokens": 41}, ["60", "min_tokens 41", "100"]),
        ([1, 1000], {}, ["1000"]),
        ([1, -1], {}, ["-1"]),
        ([1, "a"], {}, ["'a'"]),
        ([1, 2.0], {}, ["2.0"]),
        ([1, True], {}, ["True"]),
        ([1], {"stop_token_ids": [1000]}, ["stop_token_ids", "1000"]),
        ([1], {"logit_bias": {5000: 1.0}}, ["logit_bias", "5000"]),
        ([1] * 81, {}, ["81 tokens", "11 pages of 8", "has 10"]),
    ],
)
def test_what_cannot_be_served_is_refused_with_numbers(prompt, params, numbers):
    with pytest.raises(RequestError) as caught:
        check_request(Request(1, prompt, SamplingParams(**params)), LIMITS)
    assert all(number in caught.value.message for number in numbers)
    assert caught.value.hint


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": "high"},
        {"priority": 0.5},
        {"priority": -(2**63)},
        {"salt": b"x"},
        {"salt": "\ud800"},
    ],
)
def test_a_place_in_line_is_a_number_and_a_salt_is_text(fields):
    with pytest.raises(RequestError, match=r"priority is|salt (is|has)"):
        check_request(Request(1, [1], SamplingParams(), **fields), LIMITS)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([0, 999], {}),
        ([1] * 80, {}),  # all pages: what it outgrows is found out later
        ([1] * 60, {"max_tokens": 40}),
        ([1] * 75, {"max_tokens": None}),
        (range(5), {"stop_token_ids": [999], "logit_bias": {0: 1}}),
    ],
)
def test_what_just_fits_is_taken(prompt, params):
    check_request(Request(1, prompt, SamplingParams(**params)), LIMITS)


@pytest.mark.parametrize(
    "fields",
    [{"rows": 0}, {"pages": 1}, {"step_tokens": 0}, {"page_size": -1}, {"policy": "longest"}, {"mixed_step_tokens": 3},
     {"mixed_step_tokens": 65},
     {"prefill_chunk": -1}, {"context": 1.5}, {"vocabulary": 0}, {"vocabulary": 2**32}],
)  # fmt: skip
def test_limits_that_no_engine_can_have(fields):
    (name,) = fields
    with pytest.raises(RequestError, match=name):
        msgspec.structs.replace(LIMITS, **fields)


def test_a_request_is_itself_and_nobody_else():
    one, two = (Request("a", [1], SamplingParams()) for _ in range(2))
    assert one != two
    assert one == one
    assert one.pending == 0
    assert "waiting" in repr(one)
    with pytest.raises(AttributeError):
        one.colour = "red"  # pyrefly: ignore
