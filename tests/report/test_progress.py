"""The one progress line: how far, how long, and only for a person."""

import io

import pytest

from cairn.report.progress import Bar, StatusLine, byte_progress, clock_time, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_log_has_a_line_in_half_a_minute_and_nothing_of_what_is_quick():
    log, quiet, clock = io.StringIO(), io.StringIO(), Clock()
    with (
        Bar("work", 10, stream=log, clock=clock) as bar,
        Bar("work", 10, stream=quiet, shown=False, clock=clock) as other,
    ):
        for step in range(7):
            clock.now = 10.0 * step
            bar.update(step, "loss 2.1", now=True)
            other.update(step)
        bar.clear()
    StatusLine(log).show("x")
    wanted = ["work 3/10, 1:10 left, loss 2.1", "work 6/10, 0:40 left, loss 2.1"]
    assert log.getvalue().splitlines() == wanted
    assert quiet.getvalue() == ""


def test_the_line_says_how_far_and_how_long_and_is_removed_at_the_end():
    terminal, clock = Terminal(), Clock()
    with Bar("work", 480, stream=terminal, clock=clock) as bar:
        assert bar.left_s() is None
        clock.now = 30.0
        bar.update(120, "loss 2.1")
        assert bar.line() == f"work  {'━' * 6}{'╌' * 18}  120/480  1:30 left  loss 2.1"
        bar.update(120, left_s=5)
        assert "0:05 left" in bar.line()
    assert "120/480" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_run_that_goes_on_counts_its_own_pace():
    clock = Clock()
    bar = Bar("training", 100, done=90, stream=Terminal(), clock=clock)
    clock.now = 10.0
    bar.update(95)
    assert bar.left_s() == pytest.approx(10.0)


def test_it_is_drawn_ten_times_a_second_at_most():
    terminal, clock = Terminal(), Clock()
    with Bar("work", 1000, stream=terminal, clock=clock) as bar:
        for step in range(1000):
            clock.now = step / 1000
            bar.update(step)
    assert 9 <= terminal.getvalue().count("work") <= 11


def test_a_line_fits_into_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    StatusLine(terminal).show("x" * 100)
    assert terminal.getvalue().count("x") == 39


def test_steps_and_bytes(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with progress(3, "checking") as advance:
        advance("first")
    assert "1/3" in terminal.getvalue()
    assert "first" in terminal.getvalue()
    with byte_progress(2_000_000, "loading") as count:
        count(500_000)
    assert "/2 MB" in terminal.getvalue()


def test_times_are_written_as_clocks():
    assert [clock_time(s) for s in (0, 59.6, 125, 3723)] == ["0:00", "1:00", "2:05", "1:02:03"]
