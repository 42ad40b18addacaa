"""A browser for each file of tests, and one server for all."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kept_run import hostile_rows, write_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE, DESK = (390, 844), (1440, 900)
SIZE = {"width": DESK[0], "height": DESK[1]}
PATIENCE = 180_000
"""Milliseconds that a browser may take on a busy machine; nothing waits for them to pass."""


GO = """address => new Promise(done => {
    const before = location.href;
    addEventListener('hashchange', () => requestAnimationFrame(() => requestAnimationFrame(done)), { once: true });
    location.hash = address;
    if (location.href === before) done();
})"""
"""Changes the address, and waits until the page has drawn what it knows of the new one."""


FORGET = """() => {
    if (location.origin !== 'null') {
        localStorage.clear();
        sessionStorage.clear();
    }
}"""
"""Removes what the page keeps; one that is no file and has no server keeps nothing."""


class Page:
    """A page of the browser, which keeps what went wrong in it: errors, warnings, and requests to other places."""

    def __init__(self, page: Any, base: str) -> None:
        self.page = page
        self.base = base
        self.problems: list[str] = []
        self._heard: dict[str, Callable[[Any], Any]] = {
            "console": lambda message: message.type in ("error", "warning") and self.problems.append(message.text),
            "pageerror": lambda error: self.problems.append(str(error)),
            "dialog": lambda dialog: (self.problems.append(f"dialog {dialog.message}"), dialog.dismiss()),
            "request": self._asked,
        }
        for event, listener in self._heard.items():
            page.on(event, listener)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.base, "data:", "blob:")):
            self.problems.append(f"request to {request.url[:100]}")

    def open(self, address: str) -> Any:
        """Opens an address such as `#/r/sums`, without loading the page again; returns once nothing is being read."""
        url = self.base + address
        if self.page.url.startswith(self.base) and "#" in self.page.url:
            self.page.evaluate(GO, address)
        else:
            self.page.goto(url)
        self.settle()
        return self.page

    def leave(self) -> None:
        """Leaves nothing of the page but what its browser has read."""
        for event, listener in self._heard.items():
            self.page.remove_listener(event, listener)
        self.page.evaluate(FORGET)
        self.page.goto("about:blank")
        self.page.emulate_media(color_scheme="light")
        self.page.set_viewport_size(SIZE)

    def settle(self) -> None:
        """Waits until nothing is being read."""
        self.page.wait_for_function(
            "() => document.querySelector('main') && "
            "![...document.querySelectorAll('[role=status]')].some(e => /^(Reading|Adding)/.test(e.textContent))"
        )

    def run_code(self, code: str, value: Any = None) -> Any:
        """Returns what an async function in the page returns; it may import the page's modules."""
        return self.page.evaluate(code, value)


@contextmanager
def serving(root: Path, port: int = 0) -> Iterator[str]:
    """Serves the runs of a folder from a thread; gives the address of the page."""
    from rollgrad.adapters.servers.server import Server
    from rollgrad.adapters.servers.ui import create_ui_app, needs_token
    from rollgrad.entrypoints.ui.inline import STATIC
    from rollgrad.entrypoints.ui.runs import Runs

    started = threading.Event()
    held: dict[str, Any] = {}

    async def serve() -> None:
        streams_end, end = asyncio.Event(), asyncio.Event()
        app = create_ui_app(Runs(root), STATIC, streams_end)
        server = Server(app, port=port, name="page of runs", guarded=needs_token)
        held.update(address=await server.start() + "/", loop=asyncio.get_running_loop(), end=end)
        started.set()
        await end.wait()
        streams_end.set()
        await server.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    yield held["address"]
    held["loop"].call_soon_threadsafe(held["end"].set)
    thread.join()


@contextmanager
def opened(browser: Any, base: str) -> Iterator[Page]:
    """Gives a page of `base`; an error in it, or a request to another place, fails the test. It is always the same one,
    as if nobody had used it: a new one is a process, which works longer than most tests."""
    if not browser.contexts:
        browser.new_context(viewport=SIZE).set_default_timeout(PATIENCE)
        browser.contexts[0].new_page()
    made = Page(browser.contexts[0].pages[0], base)
    yield made
    problems = list(made.problems)
    made.leave()
    assert not problems


@contextmanager
def started() -> Iterator[Any]:
    """Gives the browser that is installed."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, "no browser is installed: on Debian `apt-get install chromium`"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"], timeout=PATIENCE)
        yield browser
        browser.close()


# Of the module, and not of the session: playwright's event loop runs in this thread as long as it lives, and tests of
# other files start loops of their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as made:
        yield made


@pytest.fixture(scope="session")
def kept_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `sums`, and `other` with hostile texts in its last step."""
    root = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("sums", "other")):
        write_run(root / name, seed=seed, extra=hostile_rows() if seed else None)
    return root


@pytest.fixture(scope="session")
def served(kept_runs: Path) -> Iterator[str]:
    """Address of the server of `kept_runs`."""
    with serving(kept_runs) as address:
        yield address


@pytest.fixture
def page(browser: Any, served: str) -> Iterator[Page]:
    """A page of the server; a test that leaves an error in it, or a request to another place, fails."""
    with opened(browser, served) as made:
        yield made
