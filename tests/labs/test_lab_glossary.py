"""Labels in Chinese: every entry keeps its numbers, and what is unknown stays as it is."""

import re

import pytest

from cairn.labs.glossary import label, labels
from cairn.labs.lab import Words

CHINESE = re.compile(r"[\u2e80-\u9fff⌈]")


def test_every_entry_is_chinese_and_keeps_its_numbers():
    faults = [
        english
        for english, chinese in labels().items()
        if not CHINESE.search(chinese) or english.count("#") != chinese.count("#")
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("english", "chinese"),
    [("ring of 8", "8 槽环"), ("DeepSeek-V3 (128 heads of 512)", "DeepSeek-V3（128 头，维度 512）"),
     ("float16, every second", "float16，隔一取一"), ("1f1b", "1f1b"), ("ring of # 8", "ring of # 8"), ("", "")],
)  # fmt: skip
def test_labels(english, chinese):
    assert label(english) == Words(english, chinese)
