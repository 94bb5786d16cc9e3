"""The screenshots of the README, taken from the real pages with a Chromium of the system.

    python docs/figures/screenshots.py [FOLDER]

    chat.png      an answer of the small model
    requests.png  its ledger
    engine.png    the engine while eight people ask
    lab.png       the report of a lab that ran here

Starts a server of its own on a free port, with the model that `cairn serve` takes by default.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

import msgspec
from playwright.sync_api import Browser, sync_playwright

QUESTION = "What is the capital of France?"
SIZE = {"width": 1120, "height": 700}
PATIENCE_MS = 120_000


def main(folder: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    command = [sys.executable, "-m", "cairn", "serve", "--port", "0", "--max-num-seqs", "8"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        url = address(server)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            chat(browser, url, folder / "chat.png")
            engine(browser, url, folder / "engine.png")
            lab(browser, folder / "lab.png")
            browser.close()
    finally:
        server.terminate()
        server.wait(60)


def address(server: subprocess.Popen[str]) -> str:
    for line in server.stdout or ():
        if found := re.search(r"http://[\d.]+:\d+", line):
            return found[0]
    raise SystemExit("the server did not start")


def chat(browser: Browser, url: str, path: Path) -> None:
    page = browser.new_page(viewport=SIZE, color_scheme="light")
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    page.locator(".ideas button", has_text=QUESTION).click()
    page.locator('.message.answer[data-status="done"]').wait_for()
    page.locator(".message.answer .inside-link").click()
    page.locator("main > section").wait_for()
    page.wait_for_timeout(1500)
    page.screenshot(path=path.with_name("requests.png"))
    page.go_back()
    page.wait_for_timeout(1000)
    page.screenshot(path=path)
    page.close()


def engine(browser: Browser, url: str, path: Path) -> None:
    asking = [threading.Thread(target=ask, args=(url, at), daemon=True) for at in range(8)]
    for one in asking:
        one.start()
    page = browser.new_page(viewport=SIZE, color_scheme="light")
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{url}/#/engine")
    page.wait_for_timeout(15_000)  # charts need a few seconds of history
    page.screenshot(path=path)
    page.close()


def ask(url: str, at: int) -> None:
    said = [{"role": "user", "content": f"Tell me story number {at} about a cairn."}]
    body = msgspec.json.encode({"messages": said, "max_tokens": 300, "ignore_eos": True})
    headers = {"content-type": "application/json"}
    urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    ).read()


def lab(browser: Browser, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "lab.html"
        command = [sys.executable, "-m", "cairn", "lab", "run", "recompute", "--html", str(report)]
        subprocess.run(command, check=False)
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(report.as_uri())
        # The other language would need a font that not every machine has.
        hide = "input[type=radio], input[type=radio] + label { visibility: hidden }"
        page.add_style_tag(content=hide)
        page.wait_for_timeout(1000)
        page.screenshot(path=path)
        page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
