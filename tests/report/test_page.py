"""A page is one well-formed document in which text stays text."""

import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.report import page as html
from cairn.report.page import Markup, element, join, safe


class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.seen: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag != "meta":
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_page_is_well_formed():
    document = html.page(
        "A < B",
        html.heading("Facts & figures"),
        html.facts({"registers": "32", "<odd>": '"quoted"'}),
        html.table(["stage", "ms"], [["ptx", "1"], ["<b>", "2"]]),
        html.bars({"float": 3, "none": 0}, " ms"),
        html.notice("bad", "no <script> here"),
        html.data("values", {"a": "</script><b>"}),
        script="document.title = 'x';",
        style=".x { color: red }",
    )
    reader = Reader(document)
    assert document.startswith("<!doctype html>")
    assert reader.seen.count("script") == 2
    assert "b" not in reader.seen
    for text in ("A < B", "Facts & figures", '"quoted"', "no <script> here"):
        assert text in reader.text


@given(st.text(), st.text())
def test_text_stays_text(content, attribute):
    markup = element("p", content, title=attribute, data_x="1")
    parser = HTMLParser()
    found = []
    parser.handle_starttag = lambda tag, attrs: found.append((tag, dict(attrs)))
    parser.feed(markup)
    parser.close()
    assert [tag for tag, _ in found] == ["p"]
    assert found[0][1]["data-x"] == "1"
    assert "<" not in markup.removeprefix("<p").partition(">")[2].removesuffix("</p>")


def test_markup_is_not_escaped_twice():
    assert safe(safe("<")) == "&lt;"
    assert join(["<", Markup("<b>")]) == "&lt;<b>"
    assert element("details", open=True, hidden=False) == "<details open></details>"


def test_bars_of_nothing():
    assert html.bars({}) == '<ul class="bars"></ul>'
    assert "width:0.0%" in html.bars({"none": 0.0})


def test_a_script_that_would_end_itself_is_refused():
    with pytest.raises(ValueError, match="</script"):
        html.page("x", script="'</SCRIPT>'")


def test_it_needs_only_the_standard_library():
    others = ("torch", "numpy", "msgspec", "rich")
    code = f"import sys, cairn.report.page; print([m for m in {others} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
