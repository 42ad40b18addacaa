"""A server with the part of the hub's wire that an upload needs; it keeps what is committed."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from attrs import define, field


@define
class Hub:
    """Repositories that were made, with what was asked for, files of the commits, and the tokens that came."""

    url: str = ""
    made: list[dict[str, Any]] = field(factory=list)
    files: dict[str, bytes] = field(factory=dict)
    tokens: set[str] = field(factory=set)
    broken: bool = False


@contextmanager
def hub_double() -> Iterator[Hub]:
    """Serves a hub on a free port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hub.tokens.add(self.headers.get("Authorization", ""))
            if hub.broken:
                return self._answer(403, {"error": "You have no right to write here."})
            path = self.path
            if path.endswith("/repos/create"):
                hub.made.append(json.loads(body))
                return self._answer(200, {"url": f"{hub.url}/me/name"})
            if "/preupload/" in path:
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                return self._answer(200, {"files": files})
            if "/commit/" in path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                answer = {"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.url}/me/name/commit/{'0' * 40}"}
                return self._answer(200, answer)
            return self._answer(200, {"errors": [], "warnings": []})

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
