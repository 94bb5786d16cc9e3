"""The chat in a real browser: streams, stops, asks again, edits, remembers, shows what was thought."""

import pytest
from live_server import scripted
from page_driver import paced
from playwright.sync_api import expect

LONG = "one two three four five six seven eight nine ten " * 6
RICH = "# Stones\n\n1. **flat**\n2. *round*\n\n```python\nprint(1 < 2)\n```\n<b>not bold</b>"


def test_it_loads_and_greets(tab):
    expect(tab.find(".welcome h1")).to_have_text("What is on your mind?")
    expect(tab.find(".pulse")).to_contain_text("tiny")
    expect(tab.find(".pulse")).to_contain_text("idle")
    expect(tab.find(".composer textarea")).to_be_focused()
    expect(tab.button("Send")).to_be_disabled()


def test_an_answer_streams_in(tab, server):
    with scripted(server, "alpha beta gamma"), paced(server) as steps:
        tab.say("hello")
        expect(tab.find(".wait")).to_be_visible()
        steps.release(4)
        expect(tab.answers.last).to_contain_text("alp")
        assert "gamma" not in tab.answers.last.inner_text()
        expect(tab.answers.last).to_have_attribute("aria-busy", "true")
        expect(tab.button("Stop")).to_be_visible()
        steps.release(100)
        expect(tab.ended().locator(".prose")).to_have_text("alpha beta gamma")
    expect(tab.find(".wait")).to_be_hidden()
    sent = tab.bodies[-1]
    assert sent["messages"] == [{"role": "user", "content": "hello"}]
    assert sent["stream"] is True


def test_a_small_model_takes_the_likeliest_word_and_the_page_says_so(tab, server):
    expect(tab.find(".welcome")).to_contain_text("temperature 0")
    with scripted(server, "alpha"):
        tab.say("hello")
        tab.ended()
    assert tab.bodies[-1]["temperature"] == 0


def test_the_cost_is_the_ledgers(tab, server):
    with scripted(server, "alpha beta gamma"):
        tab.say("hello")
        done = tab.ended()
        expect(done.locator(".inside-link")).to_be_visible()
    shown = done.locator(".cost").inner_text()
    id = done.locator(".inside-link").get_attribute("href").rpartition("/")[2]
    ledger = server.http.get(f"/cairn/requests/{id}").json()
    assert shown.startswith(f"{ledger['output_tokens']} tokens · ")
    assert "tok/s" in shown
    assert "first after" in shown


@pytest.mark.parametrize("way", ["button", "key"])
def test_stopping_keeps_what_came_and_frees_the_engine(tab, server, way):
    with scripted(server, LONG), paced(server) as steps:
        tab.say("count")
        steps.release(8)
        expect(tab.answers.last).to_contain_text("one")
        if way == "button":
            tab.button("Stop").click()
        else:
            tab.press("Escape")
        stopped = tab.ended("stopped")
        expect(stopped).to_contain_text("one")
        expect(stopped.locator(".cost")).to_contain_text("stopped")
        expect(tab.button("Send")).to_be_visible()
    server.at_rest()


def test_asking_again_keeps_both_answers(tab, server):
    with scripted(server, "the first"):
        tab.say("hello")
        tab.ended()
    with scripted(server, "the second"):
        tab.button("Answer again (r)").click()
        expect(tab.answers.last).to_contain_text("the second")
        tab.ended()
    expect(tab.answers).to_have_count(1)
    assert tab.bodies[-1]["messages"] == [{"role": "user", "content": "hello"}]
    expect(tab.find(".answer .turner")).to_contain_text("2/2")
    tab.button("Earlier version").click()
    expect(tab.answers.last).to_contain_text("the first")
    expect(tab.button("Earlier version")).to_be_disabled()


def test_editing_begins_a_branch_and_loses_nothing(tab, server):
    with scripted(server, "fine"):
        tab.say("helo")
        tab.ended()
        tab.find(".message.user").hover()
        tab.button("Edit").click()
        tab.find(".edit textarea").fill("hello")
        tab.press("Enter")
        expect(tab.find(".bubble")).to_have_text("hello")
        tab.ended()
    assert tab.bodies[-1]["messages"] == [{"role": "user", "content": "hello"}]
    tab.find(".message.user").hover()
    tab.button("Earlier version").click()
    expect(tab.find(".bubble")).to_have_text("helo")
    expect(tab.answers).to_have_count(1)


def test_conversations_stay_in_the_browser(tab, server):
    with scripted(server, "yes"):
        tab.say("about stones")
        tab.ended()
        tab.say("and more")
        expect(tab.answers).to_have_count(2)
        tab.ended()
    roles = [message["role"] for message in tab.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    tab.find(".new-chat").click()
    expect(tab.find(".welcome")).to_be_visible()
    with scripted(server, "no"):
        tab.say("about rivers")
        tab.ended()
    expect(tab.find(".conversations li")).to_have_text(["about rivers", "about stones"])
    tab.page.reload()
    expect(tab.find(".bubble")).to_have_text("about rivers")
    tab.find(".conversations li a", has_text="stones").click()
    expect(tab.find(".bubble")).to_have_text(["about stones", "and more"])
    tab.page.on("dialog", lambda dialog: dialog.accept())
    tab.find(".conversations li", has_text="stones").hover()
    tab.button("Delete about stones").click()
    expect(tab.find(".conversations li")).to_have_text(["about rivers"])
    kept = tab.page.evaluate(
        "Object.keys(localStorage).filter(key => key.startsWith('cairn.chat.')).length"
    )
    assert kept == 1


def test_parameters_are_sent(tab, server):
    tab.press("Tab")  # out of the text field
    tab.find("[data-does=parameters]").click()
    values = {
        "system": "Be kind.",
        "temperature": "0",
        "top_p": "0.9",
        "top_k": "5",
        "max_tokens": "3",
        "seed": "7",
    }
    for name, value in values.items():
        tab.find(f"#parameter-{name}").fill(value)
    tab.button("Done").click()
    tab.say("hello")
    tab.ended()
    sent = tab.bodies[-1]
    assert sent["messages"][0] == {"role": "system", "content": "Be kind."}
    assert {name: sent[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")} == {
        "temperature": 0, "top_p": 0.9, "top_k": 5, "max_tokens": 3, "seed": 7,
    }  # fmt: skip
    expect(tab.answers.last.locator(".cost")).to_contain_text("3 tokens")
    tab.find("[data-does=parameters]").click()
    tab.button("Reset").click()
    tab.button("Done").click()
    sent = tab.sent_by(lambda: tab.say("again"))
    expect(tab.answers).to_have_count(2)
    tab.press("Escape")
    assert "seed" not in sent
    assert sent["temperature"] == 0  # as it began
    assert [message["role"] for message in sent["messages"]] == [
        "user",
        "assistant",
        "user",
    ]


def test_markdown_is_drawn_and_html_is_not(tab, server):
    with scripted(server, RICH):
        tab.say("hello")
        prose = tab.ended().locator(".prose")
    expect(prose.locator("h3")).to_have_text("Stones")
    expect(prose.locator("ol > li")).to_have_text(["flat", "round"])
    expect(prose.locator("li strong")).to_have_text("flat")
    expect(prose.locator(".code code")).to_have_text("print(1 < 2)")
    expect(prose).to_contain_text("<b>not bold</b>")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.button("Copy this code").click()
    expect(tab.button("Copied")).to_be_visible()
    assert tab.page.evaluate("navigator.clipboard.readText()") == "print(1 < 2)"
    tab.button("Copy the answer").click()
    tab.page.wait_for_function(
        "async text => await navigator.clipboard.readText() === text", arg=RICH
    )


def test_reasoning_is_folded_away(tab, server):
    with scripted(server, "Let me see.</think>\n\nYes."):
        tab.say("Think: is it?")
        done = tab.ended()
    expect(done.locator(".prose")).to_have_text("Yes.")
    expect(done.locator(".thought-text")).to_be_hidden()
    done.locator("summary").click()
    expect(done.locator(".thought-text")).to_have_text("Let me see.")
    with scripted(server, "No."):
        tab.say("sure?")
        expect(tab.answers).to_have_count(2)
        tab.ended()
    assert tab.bodies[-1]["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_events_are_found_however_the_stream_is_cut(tab):
    """Also between the two bytes of a line's end, and inside of a letter's."""
    events = ['{"a": 1}', "zwölf 石", "two\nlines", "", "[DONE]"]
    lines = [
        f"data: {event}".replace("\n", "\ndata: ").replace("\n", "\r\n") + "\r\n\r\n"
        for event in events
    ]
    stream = list((": a comment\r\n\r\nevent: x\r\n" + "".join(lines)).encode())
    found = tab.page.evaluate(
        """async bytes => {
            const {events} = await import("/web/server.js");
            const read = async size => {
                const body = new ReadableStream({start(out) {
                    for (let at = 0; at < bytes.length; at += size)
                        out.enqueue(new Uint8Array(bytes.slice(at, at + size)));
                    out.close();
                }});
                const found = [];
                for await (const event of events({body})) found.push(event);
                return found;
            };
            return Promise.all([1, 2, 3, 7, 1000].map(read));
        }""",
        stream,
    )
    assert found == [events] * 5
