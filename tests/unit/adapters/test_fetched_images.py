"""Images by URL: what a stranger's data set may have fetched, from real servers, and what not."""

import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgrad.adapters.data import fetched_images
from rollgrad.adapters.data.fetched_images import FetchedImages, is_public
from rollgrad.domain.errors import ImageError
from tests.tiny_vision import picture

RED = picture((200, 0, 0))


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers by path: an image, a redirect, or something wrong; `asked` counts requests."""

    asked: list[str]

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
            while not self.server.ended.wait(0.05):  # type: ignore[attr-defined]
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


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    handler = type("Handler", (Answers,), {"asked": []})
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    made.ended = threading.Event()  # type: ignore[attr-defined]
    made.handle_error = lambda *_: None  # type: ignore[method-assign] # of clients that hang up
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.ended.set()  # type: ignore[attr-defined]
    made.shutdown()
    made.server_close()
    thread.join()


def at(server: http.server.ThreadingHTTPServer, path: str) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/{path}"


def asked(server: http.server.ThreadingHTTPServer) -> list[str]:
    return server.RequestHandlerClass.asked  # type: ignore[attr-defined, no-any-return]


def test_an_image_is_fetched_once_and_kept(server: http.server.ThreadingHTTPServer, tmp_path: Path) -> None:
    url = at(server, "red.png?key=1")
    images = FetchedImages(tmp_path / "images", any_address=True)
    images.ahead([url, url, "red.png", b"file"])
    kept = images.source(url)
    assert Path(kept).read_bytes() == RED
    assert FetchedImages(tmp_path / "images", any_address=True).source(url) == kept
    assert asked(server) == ["/red.png?key=1"]
    assert images.source("red.png") == "red.png"
    message = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}],
    }
    assert images.local([message]) == [
        {"role": "user", "content": [{"type": "image", "image": kept}, {"type": "text", "text": "?"}]}
    ]


def test_redirects_are_followed_so_far(server: http.server.ThreadingHTTPServer, tmp_path: Path) -> None:
    images = FetchedImages(tmp_path, any_address=True)
    assert images.path(at(server, f"redirect?to={at(server, 'red.png')}")).read_bytes() == RED
    with pytest.raises(ImageError, match="redirects more than 5 times"):
        images.path(at(server, "around"))
    assert asked(server).count("/around") == 6


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing", "the server answered 404"),
        ("page", "An image cannot be read"),
        ("redirect?to=file:///etc/passwd", "file is not http or https"),
        ("redirect?to=ftp://127.0.0.1/red.png", "ftp is not http or https"),
        ("redirect?to=http://user:secret@127.0.0.1/red.png", "a URL with a user is not asked for"),
        ("endless", "larger than 1 MiB"),
        ("slow", "it took more than 0.3 s"),
    ],
)
def test_what_is_no_image_is_a_sentence_and_not_kept(
    server: http.server.ThreadingHTTPServer, tmp_path: Path, path: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_images, "MOST_BYTES", 2**20)
    if path == "slow":
        monkeypatch.setattr(fetched_images, "SECONDS", 0.3)
    images = FetchedImages(tmp_path, any_address=True)
    for _ in range(2):  # the second time it is known
        with pytest.raises(ImageError, match=said) as caught:
            images.path(at(server, path))
        assert "secret" not in str(caught.value)
    assert len(asked(server)) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433"])
def test_this_machine_is_not_asked_unless_that_is_allowed(
    server: http.server.ThreadingHTTPServer, tmp_path: Path, host: str
) -> None:
    images = FetchedImages(tmp_path)
    with pytest.raises(ImageError, match=r"has no public address, and --data\.fetch_images any"):
        images.path(at(server, "red.png").replace("127.0.0.1", host))
    assert not asked(server)


def test_a_public_server_cannot_redirect_to_this_machine(
    server: http.server.ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of a public server lead here, as a tunnel of the test; its address is looked at, and no other."""
    port, connect = server.server_address[1], socket.create_connection
    public = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", port))]
    known = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: public if host == "images.example" else known(host, *a, **k)
    )
    monkeypatch.setattr(
        socket, "create_connection", lambda to, *a: connect(("127.0.0.1", port) if to[0] == "8.8.8.8" else to, *a)
    )
    images = FetchedImages(tmp_path)
    assert images.path(f"http://images.example:{port}/red.png").read_bytes() == RED
    with pytest.raises(ImageError, match=r"127\.0\.0\.1 has no public address"):
        images.path(f"http://images.example:{port}/redirect?to={at(server, 'blue.png')}")
    assert asked(server) == ["/red.png", f"/redirect?to={at(server, 'blue.png')}"]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.1.2.3", False),
        ("169.254.169.254", False),  # clouds tell machines their secrets there
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fec0::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:192.168.0.1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses_are_told_from_others(address: str, public: bool) -> None:
    assert is_public(address) == public
