"""Pictures in the chat page: dropped and pasted, shown, sent and answered; a model that reads text refuses them."""

import base64
import io

import pytest

pytest.importorskip("PIL", reason="pictures are decoded by Pillow")
import live_server
import tiny_vision as tiny
from live_server import scripted
from playwright.sync_api import expect

from cairn.web import site

FILE = """([data, kind]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const held = new DataTransfer();
  held.items.add(new File([bytes], "a.png", { type: "image/png" }));
  if (kind === "drop") {
    const event = new DragEvent("drop", { dataTransfer: held, bubbles: true, cancelable: true });
    document.querySelector(".thread").dispatchEvent(event);
  } else {
    const event = new ClipboardEvent("paste", { clipboardData: held, bubbles: true, cancelable: true });
    document.querySelector(".composer textarea").dispatchEvent(event);
  }
}"""


@pytest.fixture(scope="module")
def seeing(chromium):
    with live_server.live(
        tiny.folder("llava"), more=site.routes(), num_gpu_blocks_override=128
    ) as made:
        yield made
        made.at_rest()


def give(tab, kind: str) -> str:
    written = io.BytesIO()
    tiny.photograph(40, 30).save(written, "PNG")
    data = base64.b64encode(written.getvalue()).decode()
    tab.page.evaluate(FILE, [data, kind])
    return f"data:image/png;base64,{data}"


def test_a_dropped_picture_is_shown_sent_and_answered(open_tab, seeing):
    tab = open_tab(seeing)
    expect(tab.find(".composer textarea")).to_be_focused()
    expect(tab.find(".pulse")).to_contain_text("idle")
    expect(tab.find(".welcome")).to_contain_text("temperature 0")  # the model card was read
    url = give(tab, "drop")
    expect(tab.find(".attached img")).to_have_count(1)
    give(tab, "paste")
    expect(tab.find(".attached img")).to_have_count(2)
    tab.button("Remove picture 2").click()
    with scripted(seeing, "alpha"):
        tab.say("What is it?")
        expect(tab.ended().locator(".prose")).to_have_text("alpha")
    sent = tab.bodies[-1]["messages"][-1]["content"]
    assert sent[0] == {"type": "image_url", "image_url": {"url": url}}
    assert sent[1] == {"type": "text", "text": "What is it?"}
    expect(tab.find(".message.user img")).to_have_count(1)
    expect(tab.find(".attached img")).to_have_count(0)


def test_a_model_that_reads_text_takes_no_picture(tab):
    expect(tab.find(".welcome")).to_contain_text("temperature 0")  # the model card was read
    give(tab, "drop")
    expect(tab.find(".notice")).to_contain_text("reads text only")
    expect(tab.find(".attached img")).to_have_count(0)
