"""Real HTTP servers on the loopback interface that answer as a test wishes."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class _Server(ThreadingHTTPServer):
    request_queue_size = 128


class JsonServer:
    """Answers with `answer(path, body) -> (status, JSON or text)`, a GET having no body; an iterator of texts is an
    answer in events, which ends where it raises `ConnectionError`. Keeps what it was asked. Port 0 is any that is
    free."""

    def __init__(self, answer: Callable[[str, Any], tuple[int, Any]], *, port: int = 0) -> None:
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._connections: list[socket.socket] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer._connections.append(self.connection)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                self.reply(body)

            def do_GET(self) -> None:
                self.reply(None)

            def reply(self, body: Any) -> None:
                outer.paths.append(self.path)
                outer.headers.append(dict(self.headers))
                status, reply = answer(self.path, body)
                if isinstance(reply, Iterator):
                    self.close_connection = True  # its end is the answer's
                    self.send_response(status)
                    self.send_header("Content-Type", "text/event-stream")
                    self.end_headers()
                    with suppress(ConnectionError):
                        for event in reply:
                            self.wfile.write(event.encode())
                    return
                data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *arguments: None  # a client that hangs up is part of the tests
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Ends it and, as a process that dies does, its connections; may be called again."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)


class RewardServer(JsonServer):
    """Answers POSTs to its `url` with `answer(body)`."""

    def __init__(self, answer: Answer, *, port: int = 0) -> None:
        super().__init__(lambda path, body: answer(body), port=port)
        self.url += "/get_reward"
