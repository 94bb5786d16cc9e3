"""Quantities survive the way to a person and back, and bad text is answered with a way out."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.core.units import (
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_rate,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * 2**30),
        ("1.2 GB", 1_200_000_000),
        ("1.1GB", 1_100_000_000),
        ("512", 512),
        ("0", 0),
        ("3 kB", 3000),
        ("3 KB", 3000),
        ("1.5 KiB", 1536),
        ("  2 TiB ", 2 * 2**40),
    ],
)
def test_bytes_are_read_exactly(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (12e-6, "12 us"),
        (3.4e-3, "3.4 ms"),
        (0.9999999, "1 s"),
        (59.99, "59.99 s"),
        (59.999, "1m 00s"),
        (125, "2m 05s"),
        (3599.7, "1h 00m"),
        (3725, "1h 02m"),
        (86400 * 3 + 4 * 3600, "3d 04h"),
        (-125, "-2m 05s"),
        (float("inf"), "inf s"),
    ],
)
def test_durations_are_printed_with_the_unit_that_fits(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (format_bytes(80 * 2**30), "80 GiB"),
        (format_bytes(80 * 2**30, base="decimal"), "85.9 GB"),
        (format_bytes(2**30 - 1), "1 GiB"),
        (format_bytes(0), "0 B"),
        (format_bytes(-1536), "-1.5 KiB"),
        (format_rate(989e12, "FLOP"), "989 TFLOP/s"),
        (format_rate(4.2e12, "B"), "4.2 TB/s"),
        (format_count(7_616_000_000), "7.616B"),
        (format_count(999_999), "1M"),
        (format_count(512), "512"),
        (format_count(float("nan")), "nan"),
    ],
)
def test_quantities_are_printed_with_four_digits_at_most(printed, text):
    assert printed == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("12 us", 12e-6), ("12µs", 12e-6), ("2m 05s", 125), ("1h30m", 5400), ("0", 0), ("1.5s", 1.5)],
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == seconds


def test_a_rate_may_be_written_with_either_name_of_its_unit():
    assert parse_rate("989 TFLOP/s", "FLOP") == parse_rate("989TFLOPS", "FLOP") == 989e12
    assert parse_rate("4.2 TB/s", "B") == 4.2e12
    assert parse_rate("1 GiB/s", "B") == 2**30


@given(st.integers(0, 10**24), st.sampled_from(["binary", "decimal"]))
def test_bytes_survive_printing_and_reading(amount, base):
    text = format_bytes(amount, base=base)
    assert parse_bytes(text) == pytest.approx(amount, rel=1e-3)
    assert format_bytes(parse_bytes(text), base=base) == text


@given(st.floats(min_value=0, max_value=1e24), st.sampled_from(["B", "FLOP"]))
def test_rates_survive_printing_and_reading(amount, unit):
    text = format_rate(amount, unit)
    assert parse_rate(text, unit) == pytest.approx(amount, rel=1e-3, abs=1e-9)
    assert format_rate(parse_rate(text, unit), unit) == text


@given(st.integers(0, 10**24))
def test_counts_survive_printing_and_reading(amount):
    text = format_count(amount)
    assert parse_count(text) == pytest.approx(amount, rel=1e-3)
    assert format_count(parse_count(text)) == text


@given(st.floats(min_value=0, max_value=1e12))
def test_durations_survive_printing_and_reading(seconds):
    text = format_duration(seconds)
    # Two units above a minute: at worst half of the smaller one is lost.
    assert parse_duration(text) == pytest.approx(seconds, rel=1 / 110, abs=1e-12)
    assert format_duration(parse_duration(text)) == text


@pytest.mark.parametrize(
    ("parse", "text", "hint"),
    [
        (parse_bytes, "80G", "80GB for powers of 1000 or 80GiB for powers of 1024"),
        (parse_bytes, "80 gib", "did you mean '80 GiB'?"),
        (parse_bytes, "", "80GiB"),
        (parse_bytes, "-5 GB", "80GiB"),
        (parse_bytes, "1e9 B", "80GiB"),
        (parse_bytes, "nan GB", "80GiB"),
        (parse_bytes, "5 parsecs", "80GiB"),
        (parse_count, "7.6Billion", "7.6B"),
        (lambda text: parse_rate(text, "FLOP"), "989", "989 TFLOP/s"),
        (lambda text: parse_rate(text, "B"), "4.2 TB", "did you mean '4.2 TB/s'?"),
        (parse_duration, "12", "90s"),
        (parse_duration, "5s 2m", "90s"),
        (parse_duration, "5s 5s", "90s"),
        (parse_duration, "-5s", "90s"),
        (parse_duration, "5 fortnights", "90s"),
        (parse_duration, "s", "90s"),
    ],
)
def test_bad_text_is_quoted_and_answered_with_a_hint(parse, text, hint):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert repr(text) in caught.value.message
    assert hint in caught.value.hint


@given(st.text())
def test_no_text_breaks_the_parsers(text):
    for parse in (parse_bytes, parse_count, parse_duration, lambda t: parse_rate(t, "B")):
        with suppress(ConfigError):
            assert parse(text) >= 0
