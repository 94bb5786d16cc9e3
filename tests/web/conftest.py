"""A real Chromium in front of a real server with a tiny model. What no page may do is checked after every test."""

import sys
from pathlib import Path

import browser as browsers
import pytest
from playwright.sync_api import sync_playwright

sys.path.append(str(Path(__file__).parents[1] / "serve" / "http"))  # live_server is the server's

import live_server
from page_driver import Tab

from cairn.labs import learn_routes
from cairn.web import site

CONTEXT = 768
THINKS = "assistant: {% if messages[-1].content.startswith('Think') %}<think>\n{% endif %}{%"
TEMPLATE = live_server.TEMPLATE.replace("assistant: {%", THINKS)


@pytest.fixture(scope="module")
def chromium():
    """Not for the whole session: it keeps an event loop in this thread, where other tests begin their own."""
    path = browsers.chromium()
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield made
        made.close()


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    return live_server.make_folder(
        tmp_path_factory.mktemp("models") / "tiny", TEMPLATE, CONTEXT, ["</think>"]
    )


@pytest.fixture(scope="module")
def server(chromium, chat_folder):
    more = [*site.routes(), *learn_routes.routes()]
    with live_server.live(chat_folder, more=more, exercises=True) as made:
        yield made
        made.at_rest()


@pytest.fixture
def open_tab(chromium):
    """Makes tabs, each with a profile of its own; afterwards none of them may have misbehaved."""
    tabs = []

    def make(server, path="/", **options):
        tabs.append(Tab(chromium, server, **options))
        tabs[-1].goto(path)
        return tabs[-1]

    yield make
    for tab in tabs:
        tab.close()
    for tab in tabs:
        tab.was_good()


@pytest.fixture
def tab(open_tab, server):
    return open_tab(server)
