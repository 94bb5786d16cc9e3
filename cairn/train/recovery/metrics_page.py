"""The wall-time ledger of a run as /metrics on loopback: the file that the run writes, served by a thread."""

import http.server
import threading
from pathlib import Path
from typing import Any

from cairn.core.metrics import CONTENT_TYPE


def serve_metrics(path: Path, port: int) -> http.server.HTTPServer:
    """Port 0: any that is free."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            exists = self.path == "/metrics" and path.exists()
            body = path.read_bytes() if exists else b""
            self.send_response(200 if exists else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
