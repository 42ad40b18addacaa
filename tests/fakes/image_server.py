"""A server of images on this machine, some of which are none."""

import http.server
import threading

from tests.tiny_vision import picture

RED = picture((200, 0, 0))


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers by path: an image, a redirect, or something wrong; `asked` counts requests."""

    asked: list[str]
    ended: threading.Event

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name, _, place = self.path.lstrip("/").partition("?to=")
        if name == "redirect":
            self.send_response(302)
            self.send_header("Location", place)
            self.end_headers()
        elif name == "around":
            self.send_response(302)
            self.send_header("Location", self.path)
            self.end_headers()
        elif name == "slow":  # a byte now and then, for as long as somebody reads
            self.send_response(200)
            self.end_headers()
            while not self.ended.wait(0.05):
                self.wfile.write(b".")
                self.wfile.flush()
        elif name == "endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(bytes(2**16))
        else:
            self.send_response({"missing": 404}.get(name, 200))
            self.end_headers()
            self.wfile.write(b"<html>" if name == "page" else RED)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class ImageServer:
    """Serves until it is closed; `asked` has the paths that were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._ended = threading.Event()
        handler = type("Handler", (Answers,), {"asked": self.asked, "ended": self._ended})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign] # of clients that hang up
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def at(self, path: str) -> str:
        """The URL of a path."""
        return f"http://127.0.0.1:{self.port}/{path}"

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
