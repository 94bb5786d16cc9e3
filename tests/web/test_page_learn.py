"""The roadmap on the page: the map with what is done, a topic, a lab's report, both languages."""

import re

import pytest
from playwright.sync_api import expect

from cairn.cli.main import main
from cairn.labs import learner
from cairn.labs.roadmap import load


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path))
    return tmp_path


def test_the_map_a_topic_and_a_report(record, open_tab, server):
    main(["lab", "run", "positions", "attention-from-scratch", "--quick", "--json"])
    learner.answers().add("transformer", True)
    tab = open_tab(server, "/#/learn")
    expect(tab.find("[data-figure=done]")).to_have_text(f"1/{len(load().topics)} topics done")
    expect(tab.find(".course")).to_have_count(5)
    expect(tab.find(".course .chip")).to_have_count(len(load().topics))
    expect(tab.find(".course .state.done")).to_have_count(1)

    tab.find(".course .chip", has_text=load().topics["transformer"].en.title).click()
    expect(tab.find("h1")).to_have_text(load().topics["transformer"].en.title)
    expect(tab.find(".head p")).to_contain_text("done")
    expect(tab.find("details p")).to_be_hidden()
    tab.find("summary").click()
    expect(tab.find("details p")).to_have_text(load().topics["transformer"].en.answer)

    tab.find("a", has_text="Positions").click()
    expect(tab.find("p.verdict")).to_contain_text("as predicted")
    expect(tab.find(".checks tbody tr")).to_have_count(3)
    expect(tab.find(".lab-plot polyline")).to_have_count(3)


def test_in_chinese_and_kept(record, open_tab, server):
    tab = open_tab(server, "/#/learn/transformer")
    tab.find("label", has_text="中文").click()
    expect(tab.find("h1")).to_have_text(load().topics["transformer"].zh.title)
    tab.page.reload()
    expect(tab.find("h2").first).to_have_text(re.compile("[\u4e00-\u9fff]"))
    expect(tab.find(".learn")).to_have_attribute("lang", "zh-CN")
    tab.press("5")
    expect(tab.find("h1")).to_have_text("学习路线")


def test_a_lab_that_has_not_run_says_how(record, open_tab, server):
    tab = open_tab(server, "/#/learn/lab:positions")
    expect(tab.find(".learn")).to_contain_text("cairn lab run positions")


def test_a_topic_that_is_not_there(record, server):
    answer = server.http.get("/cairn/learn/topics/nothing")
    assert answer.status_code == 404
    assert "nothing" in answer.json()["error"]["message"]
