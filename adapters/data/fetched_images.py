"""Images that rows name by URL, fetched once and kept in a folder.

What a dataset names may be chosen by a stranger, and is asked for from this machine's place in its network.
Invariants: only http and https are spoken, also after redirects. Unless any address is allowed, no connection is made
to an address that is not public, neither by its name nor by a redirect. Size, time and redirects are bounded. Proxies
of the environment are not asked. What is kept is an image. Does not own: which rows there are.
"""

import hashlib
import http.client
import ipaddress
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from rollgrad.adapters.chat.image_files import MOST_BYTES, image_bytes
from rollgrad.adapters.chat.pictures import has_images, image_sources, with_sources
from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.adapters.system.unwritable import remedy
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.errors import CheckpointError, ImageError

SECONDS = 30.0
"""Time that an image may take, redirects included."""
REDIRECTS = 5
"""Redirects that are followed."""
AT_ONCE = 16
"""Images that are fetched at the same time."""
PIECE = 2**16
"""Bytes that are read at once."""
SCHEMES = ("http", "https")
REDIRECTED = (301, 302, 303, 307, 308)
TRANSLATING = ipaddress.ip_network("64:ff9b::/96")
"""Addresses whose last 32 bits are one of IPv4 (NAT64, RFC 6052)."""
UNICAST = ipaddress.ip_network("2000::/3")
"""Addresses of IPv6 that single machines of the public network may have (RFC 4291)."""


def url_of(source: Any) -> str | None:
    """Returns the URL that the source of an image is; None if it is something else."""
    if isinstance(source, Mapping) and not source.get("bytes"):  # as datasets of the hub have it
        source = source.get("path")
    return source if isinstance(source, str) and source.lower().startswith(("http://", "https://")) else None


class FetchedImages:
    """Images by URL, in the folder `folder`; `any_address` allows addresses that are not public, such as this machine's
    own. Several threads may call it."""

    def __init__(self, folder: Path, *, any_address: bool = False) -> None:
        self._folder = folder
        self._any = any_address
        self._failed: dict[str, ImageError] = {}

    def local(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages with the paths of kept files in the place of URLs of images; raises as `path`."""
        if not any(map(url_of, image_sources(messages))):
            return list(messages)
        return [with_sources(message, self.source) if has_images(message) else message for message in messages]

    def source(self, source: Any) -> Any:
        """Returns the path of the kept file if the source of an image is a URL, else the source; raises as `path`."""
        url = url_of(source)
        return source if url is None else str(self.path(url))

    def path(self, url: str) -> Path:
        """Returns the file of an image, which is fetched if it is not kept.

        Raises:
            ImageError: it cannot be fetched, in this call or an earlier one, or is no image.
            CheckpointError: it cannot be kept.
        """
        path = self._folder / hashlib.sha256(url.encode()).hexdigest()[:32]
        if path.exists():
            return path
        if (known := self._failed.get(url)) is not None:
            raise known
        try:
            content = image_bytes(self._fetched(url))
        except ImageError as error:
            self._failed[url] = error
            raise
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written ({error.strerror or error}): {remedy(error)}.") from error
        return path

    def ahead(self, sources: Iterable[Any]) -> None:
        """Fetches images at the same time. Who asks for one that failed is told why."""
        urls = list(dict.fromkeys(url for source in sources if (url := url_of(source)) is not None))

        def fetch(url: str) -> None:
            with suppress(ImageError):
                self.path(url)

        with ThreadPoolExecutor(min(AT_ONCE, len(urls) or 1)) as threads:
            list(threads.map(fetch, urls))

    def _fetched(self, url: str) -> bytes:
        shown = _shown(url)
        try:
            with _Deadline(SECONDS) as deadline:
                for _ in range(REDIRECTS + 1):
                    found = self._answer(urlsplit(url), deadline)
                    if isinstance(found, bytes):
                        return found
                    url = urljoin(url, found)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = f"it took more than {SECONDS:g} s" if deadline.over else str(error) or type(error).__name__
            raise ImageError(f"The image {shown} cannot be fetched: {reason}.") from error
        raise ImageError(f"The image {shown} cannot be fetched: it redirects more than {REDIRECTS} times.")

    def _answer(self, url: SplitResult, deadline: "_Deadline") -> bytes | str:
        """Returns the content at a URL, or where it redirects to.

        Raises:
            OSError, http.client.HTTPException, ValueError: there is none, or it is not to be asked for.
        """
        if url.scheme not in SCHEMES or not url.hostname:
            raise ValueError(f"{url.scheme or 'no scheme'} is not http or https")
        if url.username is not None:
            raise ValueError("a URL with a user is not asked for")
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection: Any = kind(url.hostname, url.port, timeout=SECONDS)
        # By this function it connects: the addresses that were checked are those that are used.
        connection._create_connection = partial(self._connected, deadline)
        try:
            target = url.path or "/"
            connection.request("GET", f"{target}?{url.query}" if url.query else target, headers={"Accept": "image/*"})
            response = connection.getresponse()
            if response.status in REDIRECTED and (place := response.getheader("Location")):
                return str(place)
            if response.status != http.client.OK:
                raise ValueError(f"the server answered {response.status}")
            content = bytearray()
            while piece := response.read(PIECE):
                content += piece
                if len(content) > MOST_BYTES:
                    raise ValueError(f"it is larger than {MOST_BYTES // 2**20} MiB")
            if deadline.over:  # a connection that the deadline closed looks like the end of the answer
                raise TimeoutError
            return bytes(content)
        finally:
            connection.close()

    def _connected(self, deadline: "_Deadline", address: tuple[str, int], *arguments: Any) -> socket.socket:
        """Connects as `socket.create_connection` does, to addresses that are allowed alone."""
        host, port = address
        found = {str(place[0]) for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        allowed = [one for one in found if self._any or is_public(one)]
        if not allowed:
            raise ValueError(f"{host} has no public address, and --data.fetch_images any alone allows others")
        refused: OSError = ConnectionError("it has no address")
        for one in allowed:
            try:
                return deadline.ending(socket.create_connection((one, port), *arguments))
            except OSError as error:
                refused = error
        raise refused


class _Deadline:
    """A block after whose time its connections are shut down: a server that sends a byte now and then would else never
    end. `over` says whether it has come to that."""

    def __init__(self, seconds: float) -> None:
        self.over = False
        self._open: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def ending(self, connected: socket.socket) -> socket.socket:
        """Returns a connection that ends with the time."""
        self._open.append(connected.dup())  # which stays what it is when TLS wraps the connection
        if self.over:
            raise TimeoutError
        return connected

    def __enter__(self) -> "_Deadline":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        for connected in self._open:
            connected.close()

    def _end(self) -> None:
        self.over = True
        for connected in self._open:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


def is_public(address: str) -> bool:
    """Returns whether an address is of the public network.

    >>> is_public("8.8.8.8"), is_public("127.0.0.1"), is_public("::ffff:10.0.0.1"), is_public("64:ff9b::a00:1")
    (True, False, False, False)
    """
    known = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(known, ipaddress.IPv6Address):
        within = int(known) & 0xFFFFFFFF if known in TRANSLATING else None
        inner = known.ipv4_mapped or known.sixtofour or (None if within is None else ipaddress.IPv4Address(within))
        if inner is None:
            return known.is_global and known in UNICAST
        known = inner
    return known.is_global and not known.is_multicast


def _shown(url: str) -> str:
    """Returns a URL for a message, without what may be a key in it."""
    found = urlsplit(url)
    return f"{found.scheme}://{found.netloc.rpartition('@')[2]}{found.path}"[:200]
