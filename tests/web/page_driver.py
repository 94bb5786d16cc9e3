"""One tab of the browser, in the words of the tests; and an engine that takes a step only when it is told to.

tab.say("hello")                         types and presses Enter
tab.answer().to_contain("...")           waits for it
with paced(server) as steps: steps.release(3)
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import live_server
from playwright.sync_api import Browser, Locator, expect

PATIENCE_MS = 30_000
expect.set_options(timeout=PATIENCE_MS)
DESKTOP = dict(width=1280, height=800)
PHONE = dict(width=360, height=740)


class Tab:
    def __init__(self, browser: Browser, server: live_server.Live, **options: Any) -> None:
        self.url = server.url
        self.context = browser.new_context(
            **({"viewport": DESKTOP, "reduced_motion": "reduce"} | options)
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.bodies: list[dict[str, Any]] = []  # of requests for an answer
        self.outside: list[str] = []
        self.errors: list[str] = []
        self.expected_errors = ("Failed to load resource",)  # the browser's own note on any 4xx
        self.page.on("request", self._seen)
        self.page.on("console", lambda line: self._said(line.type, line.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _seen(self, request: Any) -> None:
        if not request.url.startswith((self.url, "blob:")):
            self.outside.append(request.url)
        if "/v1/" in request.url and request.post_data:
            self.bodies.append(json.loads(request.post_data))

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not text.startswith(self.expected_errors):
            self.errors.append(text)

    def was_good(self) -> None:
        """It asked nobody but its server, and nothing in it failed or was forbidden by its policy."""
        assert not self.outside
        assert not self.errors

    def close(self) -> None:
        self.context.close()

    # -- what a person does ----------------------------------------------------------------------

    def goto(self, path: str) -> None:
        """Until its view is there: what is typed before belongs to nobody."""
        self.page.goto(self.url + path)
        expect(self.find("main > section")).to_be_visible()

    def find(self, selector: str, **options: Any) -> Locator:
        return self.page.locator(selector, **options)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def say(self, text: str) -> None:
        self.find(".composer textarea").fill(text)
        self.press("Enter")

    def sent_by(self, act: Callable[[], None]) -> dict[str, Any]:
        """The request for an answer that `act` leads to. A page shows the question before it sends it."""
        asks = lambda one: "/v1/" in one.url and bool(one.post_data)  # noqa: E731
        with self.page.expect_request(asks) as request:
            act()
        return json.loads(request.value.post_data)

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    # -- what a person sees ----------------------------------------------------------------------

    @property
    def answers(self) -> Locator:
        return self.find(".message.answer")

    def ended(self, status: str = "done") -> Locator:
        """The last answer, once it has ended so."""
        expect(self.answers.last).to_have_attribute("data-status", status)
        return self.answers.last

    def is_wider_than_its_window(self) -> bool:
        return self.page.evaluate(
            """() => document.documentElement.scrollWidth > innerWidth
                || [...document.querySelectorAll("main, .scroller, .inside")].some(e => e.scrollWidth > e.clientWidth)
                || [...document.querySelectorAll("main *")].some(e => e.checkVisibility({visibilityProperty: true})
                    && !e.closest("pre, .scroll, .off-screen, .track, .uplot, [inert]")
                    && e.getBoundingClientRect().right > innerWidth + 1)"""
        )


@contextmanager
def paced(server: live_server.Live) -> Iterator[threading.Semaphore]:
    """The engine takes one step for each release; in the end as many as it likes."""
    steps, free, step = threading.Semaphore(0), threading.Event(), server.engine.step

    def waits() -> Any:
        if not free.is_set():
            steps.acquire(
                timeout=2 * live_server.PATIENCE_S
            )  # a test that failed must not stop the engine for good
        return step()

    server.engine.step = waits
    try:
        yield steps
    finally:
        free.set()
        steps.release()
        server.engine.step = step
