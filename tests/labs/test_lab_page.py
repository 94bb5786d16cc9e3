"""The page of labs: whole, without a network, and in a real browser the switch shows one language."""

from html.parser import HTMLParser

import browser
import pytest
from lab_samples import ceilings, lab, outcome
from playwright.sync_api import sync_playwright

from cairn.labs.entry import failed_entry, measured_entry, skipped_entry, where_of
from cairn.labs.lab import Words, judge
from cairn.labs.lab_page import render

WHERE = where_of(ceilings(), "0.1", "abcdef0123456789")
WHEN = dict(at="2026-01-01T00:00:00+00:00", quick=True, where=WHERE)
LABS = {name: lab(name) for name in ("one", "two", "bad", "off")}
FOUND = outcome()
ONE, TWO = (
    measured_entry(LABS[name], FOUND, judge(LABS[name], FOUND), seconds=1.5, **WHEN)
    for name in ("one", "two")
)
BAD = failed_entry(LABS["bad"], "Traceback\nValueError: <x>", seconds=1.0, **WHEN)
OFF = skipped_entry(LABS["off"], [Words("needs gpu", "需要 gpu")], **WHEN)


class Whole(HTMLParser):
    """Every element that opens closes, in order; nothing is fetched from anywhere."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            assert name not in ("src", "onload")
            assert name != "href" or value.startswith("#")
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("entries", [[], [ONE], [ONE, TWO, BAD, OFF]])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_it_is_whole(entries, language):
    page = render(entries, LABS, language)
    reader = Whole()
    reader.feed(page)
    assert reader.open == []
    assert "curve <b>" not in page
    assert page.count("<svg") == 2 * sum(len(entry.plots) for entry in entries)


def test_a_lab_that_is_gone_still_shows_its_figures():
    page = render([ONE, TWO], {"two": LABS["two"]})
    assert page.count("11 GB/s") == 2


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=browser.chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield made
        made.close()


def test_in_a_browser(chromium, tmp_path):
    path = tmp_path / "out.html"
    path.write_text(render([ONE, TWO, BAD, OFF], LABS), encoding="utf-8")
    tab = chromium.new_context(java_script_enabled=False, offline=True).new_page()
    asked = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(path.as_uri())
    section = tab.locator("#one")
    assert section.get_by_text("It is so.", exact=True).is_visible()
    assert not section.get_by_text("中文 It is so.", exact=True).is_visible()
    assert section.locator("svg").filter(visible=True).count() == 1
    tab.get_by_role("radio", name="中文").check()
    assert section.get_by_text("中文 It is so.", exact=True).is_visible()
    assert not section.get_by_text("It is so.", exact=True).is_visible()
    assert section.locator("svg").filter(visible=True).count() == 1
    answer = section.get_by_text("中文 Answer 2.", exact=True)
    assert not answer.is_visible()
    section.get_by_text("中文 Question 2?", exact=True).click()
    assert answer.is_visible()
    cells = section.locator("tbody tr").first.locator("td").all_inner_texts()
    assert [cell.strip() for cell in cells] == [
        "中文 near",
        "10 GB/s",
        "11 GB/s",
        "+10%",
        "±20%",
        "✓",
    ]
    assert tab.locator("#bad pre").inner_text().endswith("ValueError: <x>")
    tab.get_by_role("radio", name="出错").check()  # the filter: only what failed
    shown = tab.locator("section").filter(visible=True)
    assert [one.get_attribute("id") for one in shown.all()] == ["bad"]
    assert tab.locator(".summary tbody tr").filter(visible=True).count() == 1
    tab.get_by_role("radio", name="全部").check()
    assert shown.count() == 4
    tab.set_viewport_size({"width": 360, "height": 700})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert asked == [path.as_uri()]


def test_it_can_begin_in_chinese(chromium, tmp_path):
    path = tmp_path / "out.html"
    path.write_text(render([ONE], LABS, "zh"), encoding="utf-8")
    tab = chromium.new_page()
    tab.goto(path.as_uri())
    assert tab.title() == "中文 Title of one"
    assert tab.locator("html").get_attribute("lang") == "zh-CN"
    assert tab.get_by_text("中文 It is so.", exact=True).is_visible()
