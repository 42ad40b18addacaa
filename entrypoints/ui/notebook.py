"""`rollgrad.show`: the page of runs inside a notebook."""

import asyncio
import secrets
import threading
from html import escape
from pathlib import Path

from rollgrad.adapters.servers.server import Server
from rollgrad.adapters.servers.ui import create_ui_app, needs_token
from rollgrad.domain.errors import DataError
from rollgrad.entrypoints.ui.inline import STATIC
from rollgrad.entrypoints.ui.runs import Runs, newest_run

HEIGHT = 900


class RunPage:
    """The page, served by a thread of this process to this machine alone, until `close` or the end of the process. A
    notebook shows it where it is the value of a cell; `url` has a token of its own, without which it shows nothing."""

    def __init__(self, runs: Runs, *, height: int = HEIGHT) -> None:
        self._height = height
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        token = secrets.token_urlsafe()
        app = create_ui_app(runs, STATIC, self._stopping)
        self._server = Server(app, token=token, name="page of runs", guarded=needs_token)
        self._thread = threading.Thread(target=self._loop.run_forever, name="page of runs", daemon=True)
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result()
        self.url = f"{started}/#token={token}"

    def close(self) -> None:
        """Ends the server; idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _repr_html_(self) -> str:
        """Returns what a notebook shows."""
        style = f"width: 100%; height: {self._height}px; border: 0"
        return f'<iframe src="{escape(self.url)}" title="rollgrad" style="{style}"></iframe>'

    def __repr__(self) -> str:
        return f"<page of runs at {self.url.partition('#')[0]}>"


def show(run: Path | str | None = None, *, height: int = HEIGHT) -> RunPage:
    """Shows a run in a notebook, while it goes on and afterwards: the page of `rollgrad ui`, where this is the value of
    a cell.

    Args:
        run: directory of a run, or one below which there are runs; by default the newest run below `runs/`.
        height: height of the frame, in pixels.

    Raises:
        DataError: there is no such directory, or no run.
    """
    root = newest_run() if run is None else Path(run)
    if not root.is_dir():
        raise DataError(f"{str(root)!r} is no directory: name that of a run, or one below which there are runs.")
    return RunPage(Runs(root), height=height)
