"""Images by URL: what a stranger's dataset may have fetched, from real servers, and what not."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgrad.adapters.data import fetched_images
from rollgrad.adapters.data.fetched_images import FetchedImages, is_public
from rollgrad.domain.errors import ImageError
from tests.fakes.image_server import RED, ImageServer


@pytest.fixture
def server() -> Iterator[ImageServer]:
    made = ImageServer()
    yield made
    made.close()


def test_an_image_is_fetched_once_and_kept(server: ImageServer, tmp_path: Path) -> None:
    url = server.at("red.png?key=1")
    images = FetchedImages(tmp_path / "images", any_address=True)
    images.ahead([url, url, "red.png", b"file"])
    kept = images.source(url)
    assert Path(kept).read_bytes() == RED
    assert FetchedImages(tmp_path / "images", any_address=True).source(url) == kept
    assert server.asked == ["/red.png?key=1"]
    assert images.source("red.png") == "red.png"
    assert images.source({"bytes": None, "path": url}) == kept
    message = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}],
    }
    assert images.local([message]) == [
        {"role": "user", "content": [{"type": "image", "image": kept}, {"type": "text", "text": "?"}]}
    ]


def test_redirects_are_followed_so_far(server: ImageServer, tmp_path: Path) -> None:
    images = FetchedImages(tmp_path, any_address=True)
    assert images.path(server.at(f"redirect?to={server.at('red.png')}")).read_bytes() == RED
    with pytest.raises(ImageError, match="redirects more than 5 times"):
        images.path(server.at("around"))
    assert server.asked.count("/around") == 6


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
    server: ImageServer, tmp_path: Path, path: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_images, "MOST_BYTES", 2**20)
    if path == "slow":
        monkeypatch.setattr(fetched_images, "SECONDS", 0.3)
    images = FetchedImages(tmp_path, any_address=True)
    for _ in range(2):  # the second time it is known
        with pytest.raises(ImageError, match=said) as caught:
            images.path(server.at(path))
        assert "secret" not in str(caught.value)
    assert len(server.asked) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433"])
def test_this_machine_is_not_asked_unless_that_is_allowed(server: ImageServer, tmp_path: Path, host: str) -> None:
    images = FetchedImages(tmp_path)
    with pytest.raises(ImageError, match=r"has no public address, and --data\.fetch_images any"):
        images.path(server.at("red.png").replace("127.0.0.1", host))
    assert not server.asked


def test_a_public_server_cannot_redirect_to_this_machine(
    server: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of a public server lead here, as a tunnel of the test; its address is looked at, and no other."""
    port, connect = server.port, socket.create_connection
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
        images.path(f"http://images.example:{port}/redirect?to={server.at('blue.png')}")
    assert server.asked == ["/red.png", f"/redirect?to={server.at('blue.png')}"]


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
