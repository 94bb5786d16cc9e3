"""What the last line of `cairn generate` says of its speed."""

import pytest

from cairn.cli.chat.decode_speed import Speed, in_words


@pytest.mark.parametrize(("share", "doubted"), [(0.8, False), (1.0, False), (6.0, True)])
def test_only_a_limit_that_was_passed_is_doubted(share, doubted):
    words = in_words(Speed(10 * share, 10.0, share), 1e9)
    assert f"{share:.0%} of the limit of 10" in words
    assert ("`cairn calibrate` does it again" in words) is doubted


def test_what_is_not_known_is_said():
    assert in_words(Speed(None, 10.0, None), 1e9) == "no decode"
    assert "the limit is not known" in in_words(Speed(10.0, None, None), 1e9)
