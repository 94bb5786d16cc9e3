"""What the last line of `cairn generate` says of its speed."""

import pytest

from cairn.cli.chat import decode_speed
from cairn.cli.chat.decode_speed import DOUBTED, IN_CACHE, Speed, in_words, speed_of


def test_what_is_known_is_said():
    assert in_words(Speed(8.0, 10.0, 0.8), 1e9) == (
        "8.0 tokens/s, 80% of the limit of 10 (1 GB of weights at 10 GB/s)"
    )
    assert in_words(Speed(None, 10.0, None), 1e9) == ""
    assert "the limit is not known" in in_words(Speed(10.0, None, None), 1e9)


@pytest.mark.parametrize(
    ("again", "cached", "limit", "share", "note"),
    [
        (100.0, False, 100.0, 0.6, ""),
        (20.0, False, 20.0, None, DOUBTED),
        (100.0, True, 10.0, None, IN_CACHE),
    ],
)
def test_a_limit_that_was_passed_is_measured_again(monkeypatch, again, cached, limit, share, note):
    monkeypatch.setattr(decode_speed, "_limit", lambda device, read_bytes: 10.0)
    monkeypatch.setattr(decode_speed, "_measured_again", lambda: again)
    monkeypatch.setattr(decode_speed, "_in_cache", lambda read_bytes: cached)
    found = speed_of(61, 1.0, "cpu", 1.0)
    assert found == Speed(60.0, limit, share, note)
    assert "%" not in in_words(found, 1.0) or share


def test_a_higher_bandwidth_is_kept(monkeypatch):
    """`copy_again` keeps the higher one of two measurements."""
    from cairn.hw import calibrate
    from cairn.hw.ceilings import Ceilings, Identity, Measured

    rates = [Measured(value=v, unit="B/s", low=v, high=v, runs=1, how="") for v in (5.0, 9.0, 7.0)]
    nobody = Identity(cpu=None, threads=None, gpus=[], driver=None, torch=None)
    stored = Ceilings(
        measured_at="", quick=True, identity=nobody, device="cpu", device_name="", copy=rates[2]
    )
    found = iter(rates)
    monkeypatch.setattr(calibrate, "_copy_rate", lambda *asked: next(found))
    assert calibrate.copy_again(stored, None) is stored
    assert calibrate.copy_again(stored, None).copy == rates[1]
