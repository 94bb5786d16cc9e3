"""What happens inside, as the page shows it: the engine moves, requests are taken apart, the model has its card."""

import json
import re

from live_server import scripted
from page_driver import paced
from playwright.sync_api import expect


def figure(tab, name):
    return tab.find(f"[data-figure='{name}'] dd.number")


def ask(server, text="hello", **settings):
    said = dict(model="tiny", messages=[{"role": "user", "content": text}], **settings)
    return server.http.post("/v1/chat/completions", json=said).raise_for_status()


def test_the_engine_view_moves_while_a_request_runs(tab, server, open_tab):
    watcher = open_tab(server, "/#/engine")
    expect(figure(watcher, "Running")).to_have_text("0")
    expect(watcher.find(".page-map i")).to_have_count(
        len(server.http.get("/cairn/engine").json()["pages"]["map"])
    )
    expect(watcher.find(".page-map .held")).to_have_count(0)
    with (
        scripted(server, "one two three four five six seven eight nine ten " * 4),
        paced(server) as steps,
    ):
        tab.say(
            "a prompt that fills more than one page of the cache, so that the map has something to show"
        )
        steps.release(6)
        expect(figure(watcher, "Running")).to_have_text("1")
        expect(watcher.find(".page-map .held").first).to_be_visible()
        expect(watcher.find(".batch-bar")).to_have_attribute(
            "aria-label", "1 sequence: 1 decode and 0 prefill tokens of 2,048"
        )
        expect(watcher.find(".pulse")).to_have_attribute("data-state", "busy")
        counted = watcher.find(".head p").inner_text()
        steps.release(4)
        expect(watcher.find(".head p")).not_to_have_text(counted)
    tab.ended()
    expect(figure(watcher, "Running")).to_have_text("0")
    expect(watcher.find(".page-map .held")).to_have_count(0)
    expect(watcher.find(".page-map .cached").first).to_be_visible()
    expect(watcher.find(".plot canvas")).to_have_count(3)
    expect(watcher.find(".floor .big")).to_have_text(re.compile(r"^[\d.,]+$"))
    expect(watcher.find(".floor")).to_contain_text("This machine needs at least")


def test_a_request_is_taken_apart(tab, server):
    with scripted(server, "alpha beta gamma"):
        tab.say("hello")
        tab.ended().locator(".inside-link").click()
    opened = tab.find(".request", has=tab.page.locator("[aria-expanded=true]"))
    expect(opened).to_have_count(1)
    view = server.http.get(f"/cairn/requests/{opened.get_attribute('data-id')}").json()
    rows = opened.locator(".fall")
    expect(rows).to_have_count(len(view["spans"]))
    names = {row.get_attribute("data-span") for row in rows.all()}
    assert names == {span["name"] for span in view["spans"]} >= {"queue", "prefill", "decode"}
    expect(opened.locator(".why")).to_have_text(view["text_of_reason"])
    expect(opened.locator(".tokens")).to_contain_text(
        f"{view['prompt_tokens']} → {view['output_tokens']}"
    )
    # Both in one look: the page may draw the row anew between two.
    prefill, decode = opened.evaluate(
        """row => ["prefill", "decode"].map(
            name => row.querySelector(`[data-span=${name}] .bar`).getBoundingClientRect().toJSON()
        )"""
    )
    assert decode["width"] > 0
    assert prefill["right"] <= decode["left"] + 3  # one after the other
    with tab.page.expect_download() as download:
        opened.locator("[data-does=trace]").click()
    assert json.loads(download.value.path().read_text())["traceEvents"]


def test_newest_first_or_slowest_first(server, open_tab):
    for length in (2, 40, 8):
        ask(server, max_tokens=length, ignore_eos=True)
    tab = open_tab(server, "/#/requests")

    def shown():
        return [each.get_attribute("data-id") for each in tab.find(".request").all()]

    def told(order):
        requests = server.http.get(f"/cairn/requests?order={order}&limit=100").json()["requests"]
        assert len(requests) >= 3
        return [request["id"] for request in requests]

    expect(tab.find(".request").first).to_be_visible()
    assert shown() == told("newest")
    tab.find(".segments span", has_text="Slowest").click()
    expect(tab.find(".request").first).to_have_attribute("data-id", told("slowest")[0])
    assert shown() == told("slowest")
    took = [
        request["e2e_s"]
        for request in server.http.get("/cairn/requests?order=slowest").json()["requests"]
    ]
    assert took == sorted(took, reverse=True)
    tab.find(".segments span", has_text="Newest").click()
    newest = told("newest")
    expect(tab.find(".request").first).to_have_attribute("data-id", newest[0])
    assert shown() == newest
    # While one is open the list stands still, and says what it holds back.
    tab.find(".line").nth(1).click()
    ask(server, max_tokens=2)
    expect(tab.button("1 more request: show")).to_be_visible()
    assert shown() == newest
    tab.button("1 more request: show").click()
    expect(tab.find(".request").first).to_have_attribute("data-id", told("newest")[0])


def test_a_request_that_is_forgotten_is_told(server, open_tab):
    tab = open_tab(server, "/#/requests/nobody-knows-it")
    expect(tab.find(".trouble-place .trouble")).to_contain_text("nobody-knows-it")


def test_the_model_card(server, open_tab):
    tab = open_tab(server, "/#/model")
    card = server.http.get("/cairn/model").json()
    expect(tab.find(".inside h1")).to_have_text("tiny")
    for name, value in [
        ("Layers", "2"),
        ("KV heads", "2"),
        ("Vocabulary", f"{card['vocabulary']:,}"),
        ("Hidden size", "32"),
    ]:
        fact = tab.find(".facts > div", has=tab.page.get_by_text(name, exact=True))
        expect(fact.locator("dd").first).to_have_text(value)
    expect(tab.find(".figure", has_text="Parameters").locator("dd.number")).to_contain_text("k")
    expect(tab.find(".notes li")).to_have_text(card["notes"])
    expect(tab.find(".code pre")).to_contain_text(f"curl {server.url}/v1/chat/completions")
