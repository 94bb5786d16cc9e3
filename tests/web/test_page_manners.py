"""The page is for everybody: light and dark, on a phone, by keyboard alone, without motion."""

import pytest
from live_server import scripted
from page_driver import PHONE, paced
from playwright.sync_api import expect

VIEWS = ["chat", "engine", "requests", "model"]
LONG_WORD = "stone" * 15
WIDE = f"{LONG_WORD}\n\n| a | b | c | d |\n|---|---|---|---|\n| {LONG_WORD} | 2 | 3 | 4 |\n\n```\n{LONG_WORD}\n```"


def background(tab):
    """How bright the paper is, from 0 to 255."""
    colour = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 3


def contrast(tab, selector):
    """Of a text with its page, as WCAG defines it."""
    return tab.page.evaluate(
        """selector => {
            const light = colour => {
                const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
                    .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const ink = light(getComputedStyle(document.querySelector(selector)).color);
            const paper = light(getComputedStyle(document.body).backgroundColor);
            return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
        }""",
        selector,
    )


def test_it_follows_the_system_until_it_is_told_otherwise(open_tab, server):
    light, dark = open_tab(server, color_scheme="light"), open_tab(server, color_scheme="dark")
    assert background(light) > 200
    assert background(dark) < 60
    for tab in (light, dark):
        for selector in (
            ".welcome h1",
            ".welcome p",
            ".tabs a:not([aria-current])",
            ".tabs a[aria-current]",
        ):
            assert contrast(tab, selector) >= 4.5, selector
    for _ in range(2):  # system, light, dark
        light.find("button[aria-label^=Theme]").click()
    assert background(light) < 60
    light.page.reload()
    assert background(light) < 60
    expect(light.find("button[aria-label='Theme: dark']")).to_be_visible()
    dark.press("Tab")
    dark.find("main").focus()
    dark.press("t")
    assert background(dark) > 200


def test_on_a_phone(open_tab, server):
    tab = open_tab(server, viewport=PHONE, has_touch=True, is_mobile=True)
    with scripted(server, WIDE):
        tab.say(f"hello {LONG_WORD}")
        tab.ended()
    assert not tab.is_wider_than_its_window()
    for view in VIEWS:
        tab.find(f".tabs a[href='#/{view}']").tap()
        expect(tab.find(f".tabs a[href='#/{view}']")).to_have_attribute("aria-current", "page")
        if view == "requests":
            tab.find(".line").first.tap()
            expect(tab.find(".fall").first).to_be_visible()
        if view == "engine":
            expect(tab.find(".plot canvas")).to_have_count(3)
        if view == "model":
            expect(tab.find(".notes li").first).to_be_visible()
        assert not tab.is_wider_than_its_window(), view
    tab.find(".tabs a[href='#/chat']").tap()
    expect(tab.find(".conversations")).to_be_hidden()
    tab.find(".drawer-button").tap()
    expect(tab.find(".conversations li")).to_have_count(1)
    tab.find(".new-chat").tap()
    expect(tab.find(".conversations")).to_be_hidden()
    expect(tab.find(".welcome")).to_be_visible()


def test_by_keyboard_alone(tab, server):
    with scripted(server, "one two three four five six seven eight"), paced(server) as steps:
        expect(tab.find(".composer textarea")).to_be_focused()
        tab.page.keyboard.type("first")
        tab.press("Shift+Enter")
        tab.page.keyboard.type("second")
        sent = tab.sent_by(lambda: tab.press("Enter"))
        expect(tab.find(".bubble")).to_have_text("first\nsecond")
        assert sent["messages"][0]["content"] == "first\nsecond"
        steps.release(6)
        expect(tab.answers.last).to_contain_text("one")
        tab.press("Escape")
        tab.ended("stopped")
    expect(tab.find(".composer textarea")).to_be_focused()
    tab.press("Shift+Tab")  # to the parameters
    assert tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    with scripted(server, "again"):
        tab.press("r")
        expect(tab.ended().locator(".prose")).to_have_text("again")
    for key, view in zip("2341", ["engine", "requests", "model", "chat"], strict=True):
        tab.press(key)
        expect(tab.find(f".tabs a[href='#/{view}']")).to_have_attribute("aria-current", "page")
    tab.find("main").focus()
    tab.press("3")
    expect(tab.find(".line").first).to_be_visible()
    tab.find(".line").first.focus()
    tab.press("ArrowDown", "ArrowUp", "Enter")
    expect(tab.find(".line").first).to_have_attribute("aria-expanded", "true")
    tab.press("?")
    expect(tab.find("dialog[open]")).to_contain_text("a new conversation")
    tab.press("Escape")
    expect(tab.find("dialog[open]")).to_have_count(0)
    tab.press("n")
    expect(tab.find(".welcome")).to_be_visible()
    expect(tab.find(".composer textarea")).to_be_focused()


def test_everything_that_can_be_pressed_has_a_name(tab, server):
    with scripted(server, "yes"):
        tab.say("hello")
        tab.ended()
    for view in VIEWS:
        tab.goto(f"/#/{view}")
        expect(tab.find(f".tabs a[href='#/{view}']")).to_have_attribute("aria-current", "page")
        nameless = tab.page.evaluate(
            """() => [...document.querySelectorAll("button, a, input, textarea")]
                .filter(e => e.checkVisibility() && !(e.getAttribute("aria-label") || e.textContent.trim()))
                .filter(e => !e.labels?.length && !e.title).map(e => e.outerHTML)"""
        )
        assert nameless == []


@pytest.mark.parametrize(("wish", "moves"), [("reduce", False), ("no-preference", True)])
def test_motion_is_a_choice(open_tab, server, wish, moves):
    tab = open_tab(server, reduced_motion=wish)
    with scripted(server, "yes"), paced(server):
        tab.say("hello")
        expect(tab.find(".wait")).to_be_visible()
        assert (
            tab.page.evaluate("document.querySelector('.wait i').getAnimations().length") > 0
        ) is moves
    tab.ended()
