"""The page's files over HTTP: each as it lies in the folder, with its type; nothing else, whatever is asked."""

import asyncio
import gzip
import re
from urllib.parse import unquote

import pytest
from starlette.applications import Starlette

from cairn.serve.http.protocol.openapi import document
from cairn.web import site

FILES = sorted(
    path.relative_to(site.FOLDER).as_posix() for path in site.FOLDER.rglob("*") if path.is_file()
)
OWN = [name for name in FILES if not name.startswith("vendor/")]


class Answer:
    """What the application sent."""

    def __init__(self, messages: list[dict]) -> None:
        self.status_code = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        self.content = b"".join(message["body"] for message in messages[1:])
        if self.headers.get("content-encoding") == "gzip":
            self.packed, self.content = self.content, gzip.decompress(self.content)


@pytest.fixture(scope="module")
def get():
    """Asks the application itself: a client would tidy up the paths first."""
    app = Starlette(routes=site.routes())

    def ask(path: str, **headers: str) -> Answer:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "GET", "path": unquote(path), "raw_path": path.encode(), "headers": raw,
                 "query_string": b"", "root_path": "", "server": ("x", 80), "scheme": "http"}  # fmt: skip
        sent = []

        async def send(message: dict) -> None:
            sent.append(message)

        asyncio.run(app(scope, None, send))
        return Answer(sent)

    return ask


def test_the_front_page(get):
    answer = get("/")
    assert answer.status_code == 200
    assert answer.content == (site.FOLDER / "index.html").read_bytes()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", FILES)
def test_every_file(get, name):
    content = (site.FOLDER / name).read_bytes()
    plain = get(f"/web/{name}", **{"accept-encoding": "identity"})
    assert plain.content == content
    assert "content-encoding" not in plain.headers
    packed = get(f"/web/{name}", **{"accept-encoding": "gzip, br"})
    assert packed.content == content
    if len(content) > site.SMALL:
        assert packed.headers["content-encoding"] == "gzip"
        assert int(packed.headers["content-length"]) == len(packed.packed) < len(content)
    wanted = {
        "js": "text/javascript",
        "css": "text/css",
        "svg": "image/svg+xml",
        "html": "text/html",
    }
    assert plain.headers["content-type"].startswith(wanted.get(name.rpartition(".")[2], "text/"))


def test_a_copy_that_is_still_good_is_not_sent_again(get):
    first = get("/web/app.js")
    tag = first.headers["etag"]
    assert get("/web/app.js", **{"if-none-match": f'"other", W/{tag}'}).status_code == 304
    assert get("/web/app.js", **{"if-none-match": '"other"'}).status_code == 200
    assert get("/web/dom.js").headers["etag"] != tag
    assert first.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    [
        "/web/", "/web/none.js", "/web/../site.py", "/web/%2e%2e/site.py", "/web/..%2fsite.py", "/web/..%5csite.py",
        "/web//etc/passwd", "/web/static/index.html", "/web/chat", "/web/app.js/", "/web/app.js%00", "/web/./app.js",
    ],
)  # fmt: skip
def test_nothing_else_is_there(get, path):
    assert get(path).status_code == 404


def test_no_file_names_another_host():
    """Except the name of SVG, which is no address."""
    for name in OWN:
        text = (site.FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"""["'(]\s*(https?:)?//[\w.]""", text), name


def test_no_text_becomes_markup():
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    )
    assert not [name for name in OWN if forbidden.search((site.FOLDER / name).read_text())]


def test_what_was_taken_from_others_has_its_licence():
    for folder in (site.FOLDER / "vendor").iterdir():
        assert "Permission is hereby granted" in (folder / "LICENSE").read_text()


def test_files_are_small():
    """One idea each; what is longer wants to be two."""
    for name in OWN:
        assert len((site.FOLDER / name).read_text().splitlines()) <= 300, name


def test_the_api_is_a_page_that_needs_nothing_else(get):
    """Every operation of the document, with its fields; no script, and only files of this server."""
    found = get("/docs")
    text = found.content.decode()
    assert (found.status_code, found.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path, methods in document()["paths"].items():
        for method in methods:
            assert f"<b>{method.upper()}</b> <code>{path}</code>" in text
    assert "<td>temperature</td><td>body</td><td>number, at least 0, at most 2</td>" in text
    assert "<script" not in text
    assert set(re.findall(r'(?:href|src)="([^"#]+)', text)) <= {
        "/",
        "/openapi.json",
        *(f"/web/{name}" for name in FILES),
    }
    anchors = re.findall(r'href="#([^"]+)', text)
    assert len(anchors) == len(set(anchors)) > 20
    assert all(f'id="{anchor}"' in text for anchor in anchors)
