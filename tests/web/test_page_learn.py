"""The roadmap on the page: the map with what is done, a topic, a lab's report, both languages."""

import re

import msgspec
import pytest
from playwright.sync_api import expect

from cairn.core.errors import ConfigError
from cairn.hw.ceilings import Ceilings, identify, machine_file, save
from cairn.hw.ceilings import load as load_ceilings
from cairn.hw.probe import probe
from cairn.labs import learner
from cairn.labs.catalogue import all_labs
from cairn.labs.entry import measured_entry, where_of
from cairn.labs.exercises.exercise import all_exercises, find_exercise
from cairn.labs.exercises.journal import passed, read
from cairn.labs.interview import rounds
from cairn.labs.lab import Check, Outcome, Table, Words, judge
from cairn.labs.record import append
from cairn.labs.roadmap import load


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record and a machine.json of its own: these labs need no ceilings, so none are measured."""
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path))
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path))
    here = Ceilings(
        measured_at="2026-01-01T00:00:00+00:00",
        quick=True,
        identity=identify(probe()),
        device="cpu",
        device_name="a CPU",
    )
    save(here, machine_file())
    return tmp_path


def record_a_run(name, rows):
    """As `cairn lab run` leaves it behind; the page shows any run of the record."""
    lab = all_labs()[name]
    words = Words("a", "甲")
    found = Outcome(
        checks=[Check(what=words, predicted=2.0, measured=2.0, unit="x")],
        table=Table(columns=[words], rows=[[row] for row in range(rows)]),
    )
    where = where_of(load_ceilings(machine_file()), "0.1", None)
    at = "2026-01-01T00:00:00+00:00"
    append(
        measured_entry(lab, found, judge(lab, found), at=at, seconds=1.0, quick=True, where=where)
    )


def run_from_its_page(lab, open_tab, server):
    tab = open_tab(server, f"/#/learn/lab:{lab}")
    tab.find(".run-lab input").fill("12")  # the learner's own number first
    tab.find(".run-lab button").click()
    expect(tab.find(".verdict").first).to_contain_text("as predicted", timeout=60_000)
    expect(tab.find("table.checks").first).to_be_visible()
    state = server.http.get(f"/cairn/learn/labs/{lab}/run").json()
    assert (state["running"], state["status"]) == (False, "held")
    assert len(state["steps"]) >= 1
    expect(tab.find(".guess")).to_contain_text("you said 12")


def test_the_map_a_topic_and_a_report(record, open_tab, server):
    record_a_run("attention-from-scratch", rows=3)
    run_from_its_page("positions", open_tab, server)
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
    first = tab.find(".checks tbody tr").first
    expect(first).to_contain_text("relative")  # the figure with its unit
    expect(first).to_contain_text("≤")
    expect(tab.find(".learn")).to_contain_text("4,096 radians")  # the lab's note
    expect(tab.find(".lab-plot polyline")).to_have_count(3)

    tab = open_tab(server, "/#/learn/lab:attention-from-scratch")
    expect(tab.find(".figures tbody tr")).to_have_count(3)


def test_in_chinese_and_kept(record, open_tab, server):
    tab = open_tab(server, "/#/learn/transformer")
    tab.find("label", has_text="中文").click()
    expect(tab.find("h1")).to_have_text(load().topics["transformer"].zh.title)
    tab.page.reload()
    expect(tab.find("h2").first).to_have_text(re.compile("[\u4e00-\u9fff]"))
    expect(tab.find(".learn")).to_have_attribute("lang", "zh-CN")
    tab.press("5")
    expect(tab.find("h1")).to_have_text("学习路线")


def test_the_graph_at_both_sizes(open_tab, server):
    for size in ({"width": 1280, "height": 800}, {"width": 390, "height": 844}):
        tab = open_tab(server, "/#/learn/graph:", viewport=size)
        expect(tab.find(".topic-graph .chip")).to_have_count(len(load().topics))
        edges = sum(len(topic.requires) for topic in load().topics.values())
        expect(tab.find(".topic-graph path")).to_have_count(edges)
        assert not tab.is_wider_than_its_window()
    title = load().topics["flash-attention"].en.title
    tab.find(".topic-graph .chip", has_text=title).click()
    required = load().topics["flash-attention"].requires
    expect(tab.find(".topic-graph path.near")).to_have_count(
        len(required) + sum("flash-attention" in one.requires for one in load().topics.values())
    )
    expect(tab.find(".chosen")).to_contain_text(load().topics[required[0]].en.title)
    tab.find(".chosen a").click()
    expect(tab.find("h1")).to_have_text(title)


def test_an_exercise_is_written_checked_and_passed(record, open_tab, server):
    """In both languages; the journal of this machine knows that it was passed."""
    one = find_exercise("young-daly")
    tab = open_tab(server, "/#/learn/exercises:")
    expect(tab.find("[data-figure=passed]")).to_have_text(f"0/{len(all_exercises())} passed")
    tab.find("a", has_text=one.about.title.en).click()
    editor = tab.find("textarea.editor")
    expect(editor).to_have_value(re.compile("NotImplementedError"))
    expect(tab.find("details p").first).to_be_hidden()
    tab.button("Check it").click()
    expect(tab.find(".graded .verdict")).to_have_text("not yet", timeout=60_000)
    tab.find(".cases .plain-button").first.click()  # the line that raised
    assert "raise" in tab.page.evaluate("getSelection().toString()")

    tab.find("label", has_text="中文").click()
    expect(tab.find("h1")).to_have_text(one.about.title.zh)
    editor.fill(one.answer)
    tab.button("评测").click()
    expect(tab.find(".graded .verdict")).to_have_text("通过", timeout=60_000)
    tab.page.reload()
    expect(editor).to_have_value(one.answer)  # a draft stays in this browser
    assert passed(read()) == {"young-daly"}


def test_quiz_and_interview(record, open_tab, server):
    tab = open_tab(server, "/#/learn/quiz:flash-attention")
    form = tab.find("form.question")
    form.locator("textarea").fill("nothing of it")
    form.locator("button").click()
    expect(form.locator(".verdict")).to_have_text("0%")
    assert [one.right for one in learner.answers().read().values] == [False]
    tab.find("label", has_text="中文").click()
    expect(tab.find("h1")).to_have_text("测验")

    tab = open_tab(server, "/#/learn/interview:")
    expect(tab.find("form.question")).to_have_count(
        sum(len(one.question) for one in rounds().values())
    )
    first = tab.find("form.question").first
    first.locator("textarea").fill("8 TFLOP/s, it is memory-bound")
    first.locator("button").click()
    expect(first.locator(".verdict")).to_have_text("50%")
    expect(first).to_contain_text("Lacks: 200")


def test_code_opens_at_the_named_line(open_tab, server):
    tab = open_tab(server, "/#/learn/code:cairn/cluster/reliability.py:young")
    expect(tab.find(".numbered .at")).to_contain_text("def young(")
    for place in ("../etc/passwd", "cairn/../README.md", "cairn/web/static/icon.svg", "tests/x.py"):
        answer = server.http.get("/cairn/learn/code", params={"place": place})
        assert answer.status_code == 404, place


def test_code_runs_only_for_the_learner_at_this_machine(record, server, monkeypatch):
    """Another site, a name bound to this address, a proxy, and a form cannot make this machine run code."""
    path = "/cairn/learn/exercises/young-daly/check"
    refused = {
        403: [
            {"origin": "https://elsewhere.example"},
            {"sec-fetch-site": "cross-site"},
            {"host": "rebound.example"},
            {"x-forwarded-for": "203.0.113.9"},
            {"x-cairn-router": "1"},
        ],
        415: [{"content-type": "text/plain"}],
    }
    for status, headers in refused.items():
        for one in headers:
            answer = server.http.post(path, json={"code": "raise SystemExit"}, headers=one)
            assert answer.status_code == status, one
            sent = server.http.post(
                "/cairn/learn/quiz/answer", json={"topic": "kv-cache"}, headers=one
            )
            assert sent.status_code == status, one
    assert server.http.post(path, json={"code": "x" * 300_000}).status_code == 413
    assert server.http.post(path, json={"file": "x"}).status_code == 400
    off = msgspec.structs.replace(server.service.config, exercises=False)
    with monkeypatch.context() as patch:
        patch.setattr(server.service, "config", off)
        answer = server.http.post(path, json={"code": "raise SystemExit"})
        assert (answer.status_code, "--exercises" in answer.text) == (403, True)
    with pytest.raises(ConfigError, match="exercises is True"):
        msgspec.structs.replace(server.service.config, host="0.0.0.0")
    assert read() == []
    assert learner.answers().read().values == []


def test_a_lab_that_has_not_run_says_how(record, open_tab, server):
    tab = open_tab(server, "/#/learn/lab:positions")
    expect(tab.find(".learn")).to_contain_text("cairn lab run positions")


def test_only_a_page_of_ours_starts_a_lab(server):
    """A form of another site can post text, but no JSON without asking first."""
    path = "/cairn/learn/labs/positions/run"
    assert (
        server.http.post(path, content="x", headers={"content-type": "text/plain"}).status_code
        == 415
    )
    assert server.http.post("/cairn/learn/labs/nothing/run", json={}).status_code == 404


def test_a_lesson_on_the_page(record, open_tab, server):
    tab = open_tab(server, "/#/learn/flash-attention")
    expect(tab.find("pre.source")).to_contain_text("def attention_reference(")
    expect(tab.find("pre.picture")).to_contain_text("FA3")
    paper = tab.find(".reading a", has_text="arXiv:2205.14135")
    expect(paper).to_have_count(1)  # the topic and its lesson name it, the page once
    expect(paper).to_have_attribute("href", "https://arxiv.org/abs/2205.14135")
    tab.find("label", has_text="中文").click()
    expect(tab.find(".worked")).to_contain_text("线性")


def test_a_topic_that_is_not_there(record, server):
    answer = server.http.get("/cairn/learn/topics/nothing")
    assert answer.status_code == 404
    assert "nothing" in answer.json()["error"]["message"]
