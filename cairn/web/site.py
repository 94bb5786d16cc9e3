"""The page's files over HTTP: `/` and `/web/...`, as routes that the server takes along.

    static/index.html          /
    static/chat/view.js        /web/chat/view.js
    the OpenAPI document       /docs

Ollama's clients ask for `/` to know whether their server runs, and get its words.
All files are read once, at the start; a path is looked up in that table and never reaches the file system, so no path
leads out of the folder. Browsers keep a copy and ask whether it is still good (ETag): no stale page is shown.
Knows nothing of the API but its document; the page itself calls it.
"""

import gzip
import hashlib
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from cairn.serve.http.protocol.openapi import document
from cairn.web.api_page import api_page

FOLDER = Path(__file__).parent / "static"
FRONT = "index.html"
API = "docs"  # made from the OpenAPI document, not a file
TYPES = {  # written down, because what a system knows about types differs from machine to machine
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/markdown; charset=utf-8",
    "": "text/plain; charset=utf-8",  # LICENSE
}
HEADERS = {
    # Everything comes from this server: no script, style or font from anywhere else, and none inline. Pictures that a
    # person attaches are shown from the data of their message.
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; object-src 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # keep it, and ask each time
    "vary": "accept-encoding",
}
SMALL = 512  # bytes that are not worth packing


class Asset(msgspec.Struct, frozen=True):
    """A file as it is sent."""

    content: bytes
    packed: bytes | None  # by gzip
    media_type: str
    tag: str  # of the content: another content has another tag

    def response(self, asked: Headers) -> Response:
        headers = HEADERS | {"etag": self.tag}
        known_tags = asked.get("if-none-match", "").split(",")
        if self.tag in {tag.strip().removeprefix("W/") for tag in known_tags}:
            return Response(status_code=304, headers=headers)
        if self.packed is not None and "gzip" in asked.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(self.packed, headers=headers, media_type=self.media_type)
        return Response(self.content, headers=headers, media_type=self.media_type)


class Site:
    """The table of assets, as an ASGI application for the routes below."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.assets = {
            path.relative_to(folder).as_posix(): read_asset(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in TYPES
        }
        self.assets[API] = asset_of(api_page(document()).encode(), TYPES[".html"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = API if scope["path"] == "/docs" else FRONT
        if scope["path"] == "/" and "ollama" in Headers(scope=scope).get("user-agent", "").lower():
            await Response("Ollama is running", media_type=TYPES[""])(scope, receive, send)
            return
        asset = self.assets.get(scope.get("path_params", {}).get("path", front))
        if asset is None:
            raise HTTPException(404)
        await asset.response(Headers(scope=scope))(scope, receive, send)


def read_asset(path: Path) -> Asset:
    return asset_of(path.read_bytes(), TYPES[path.suffix])


def asset_of(content: bytes, media_type: str) -> Asset:
    packed = gzip.compress(content, mtime=0) if len(content) > SMALL else None
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    return Asset(content, packed, media_type, tag)


def routes() -> list[BaseRoute]:
    site = Site()
    return [
        Route("/", site, methods=["GET"], name="page"),
        Route("/docs", site, methods=["GET"], name="api"),
        Route("/web/{path:path}", site, methods=["GET"], name="assets"),
    ]
