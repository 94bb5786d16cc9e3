"""What goes wrong is said on the page, with what can be done about it; what came before is kept."""

import live_server
import msgspec
import shared_data
from live_server import scripted
from page_driver import paced
from playwright.sync_api import expect

from cairn.serve.http.server.keys import Keys
from cairn.web import site


def trouble(tab):
    return tab.answers.last.locator(".trouble")


def cut(server):
    """As when a cable is pulled."""
    open_ones = server.server.servers[0].get_loop()
    open_ones.call_soon_threadsafe(
        lambda: [each.transport.abort() for each in list(server.server.server_state.connections)]
    )


def test_a_full_server_says_when_to_come_again(tab, server, open_tab, monkeypatch):
    rules = msgspec.structs.replace(server.service.admission.rules, rows=1, waiting=0)
    monkeypatch.setattr(server.service.admission, "rules", rules)
    with scripted(server, "yes"):
        expect(tab.find(".welcome")).to_be_visible()
        with paced(server):
            first = open_tab(server)
            first.say("hello")
            live_server.wait_until(lambda: server.service.admission.inside == 1)
            tab.say("hello")
            tab.ended("failed")
            expect(trouble(tab)).to_have_attribute("data-kind", "busy")
            expect(trouble(tab)).to_contain_text("The server is full")
            expect(trouble(tab).locator("button")).to_contain_text("Try again")
        first.ended()
        tab.button("Answer again (r)").click()
        expect(tab.ended().locator(".prose")).to_have_text("yes")
        expect(trouble(tab)).to_have_count(0)


def test_the_wait_that_the_server_asks_for_is_counted_down(tab):
    button = tab.page.evaluate_handle(
        """async () => {
            const {troubleNotice} = await import("/web/chat/trouble.js");
            const notice = troubleNotice({kind: "busy", message: "full", retryAfter: 3600}, () => {});
            document.body.append(notice);
            return notice.querySelector("button");
        }"""
    )
    assert button.inner_text() == "Try again in 3600 s"
    assert button.is_disabled()


def test_a_key_is_asked_for(server, open_tab, monkeypatch):
    monkeypatch.setattr(server.service, "keys", Keys([("alice", "sk-alice")]))
    with scripted(server, "yes"):
        tab = open_tab(server)
        dialog = tab.find("dialog[open]")
        expect(dialog).to_contain_text("This server asks for a key")
        tab.page.keyboard.type("sk-wrong")
        tab.press("Enter")
        expect(dialog).to_contain_text("is not known")
        tab.page.keyboard.type("sk-alice")
        tab.press("Enter")
        expect(dialog).to_have_count(0)
        expect(tab.find(".pulse")).to_contain_text("idle")
        tab.say("hello")
        expect(tab.ended().locator(".prose")).to_have_text("yes")
        assert "sk-alice" not in tab.page.evaluate("JSON.stringify(localStorage)")
        other = open_tab(server)
        other.button("Not now").click()
        expect(other.find(".notice .trouble")).to_have_attribute("data-kind", "key")
        expect(other.find(".pulse")).to_contain_text("needs a key")


def test_a_server_that_is_about_to_stop(tab, server, monkeypatch):
    monkeypatch.setattr(server.service.admission, "draining", True)
    tab.say("hello")
    tab.ended("failed")
    expect(trouble(tab)).to_have_attribute("data-kind", "away")
    expect(trouble(tab)).to_contain_text("takes no requests now")


def test_a_connection_that_breaks_keeps_what_came(tab, server):
    tab.expected_errors += ("",)  # the browser says what it thinks of it
    expect(tab.find(".pulse")).to_contain_text("idle")
    with scripted(server, "one two three four five six seven eight"), paced(server) as steps:
        tab.say("count")
        steps.release(6)
        expect(tab.answers.last).to_contain_text("one")
        tab.context.set_offline(True)
        cut(server)
        tab.ended("failed")
    expect(tab.answers.last).to_contain_text("one")
    expect(trouble(tab)).to_have_attribute("data-kind", "lost")
    expect(tab.find(".pulse")).to_contain_text("no connection")
    tab.say("still there?")
    expect(trouble(tab)).to_contain_text("cannot be reached")
    server.at_rest()
    tab.context.set_offline(False)
    with scripted(server, "yes"):
        trouble(tab).get_by_text("Try again", exact=True).click()
        expect(tab.ended().locator(".prose")).to_have_text("yes")
    expect(tab.find(".pulse")).to_contain_text(
        "idle"
    )  # the engine's pulse found its way back by itself


def test_a_view_that_does_not_come_says_so(tab):
    tab.expected_errors += ("",)
    expect(tab.find(".pulse")).to_contain_text("idle")
    tab.context.set_offline(True)
    tab.find(".tabs a[href='#/model']").click()
    expect(tab.find("main")).to_contain_text("Is it still running?")
    tab.context.set_offline(False)
    tab.button("Reload the page").click()
    expect(tab.find(".facts").first).to_be_visible()


def test_a_refusal_is_shown_in_the_servers_words(tab):
    tab.say("too long " * 800)
    tab.ended("failed")
    expect(trouble(tab)).to_have_attribute("data-kind", "refused")
    expect(trouble(tab)).to_contain_text("768")
    sent = tab.sent_by(lambda: tab.say("short"))
    expect(tab.answers).to_have_count(2)
    tab.press("Escape")
    # What was refused is not sent again, or no word would ever come through.
    assert sent["messages"] == [{"role": "user", "content": "short"}]
    expect(tab.answers.last).not_to_have_attribute("data-status", "running")


def test_a_model_without_a_chat_template_goes_on_writing(chromium, open_tab):
    folder = shared_data.model_folder("stories260K")
    with live_server.live(folder, more=site.routes()) as server:
        tab = open_tab(server)
        expect(tab.find(".notice")).to_contain_text("has no chat template")
        expect(tab.find(".welcome h1")).to_have_text("How does it begin?")
        tab.find("[data-does=parameters]").click()
        tab.find("#parameter-max_tokens").fill("12")
        tab.find("#parameter-temperature").fill("0")
        tab.button("Done").click()
        tab.say("Once upon a time")
        begun = tab.ended().locator(".prose").inner_text()
        assert len(begun) > 10
        assert tab.bodies[-1]["prompt"] == "Once upon a time"
        expect(tab.answers.last.locator(".cost")).to_contain_text("cut at the most tokens")
        tab.say(" The end")
        expect(tab.answers).to_have_count(2)
        tab.ended()
        sent = tab.bodies[-1]["prompt"]
        assert sent.startswith("Once upon a time")
        assert sent.endswith("The end")
        assert begun.split()[0] in sent


def test_a_model_without_a_tokenizer_is_told(server, open_tab, monkeypatch):
    monkeypatch.setattr(server.service.serving.opened, "tokenizer", None)
    tab = open_tab(server)
    expect(tab.find(".notice")).to_contain_text("has no tokenizer")
    expect(tab.find(".composer textarea")).to_be_disabled()
    expect(tab.find(".welcome")).to_be_hidden()
