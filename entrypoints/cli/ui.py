"""`rollgrad ui`: the page of runs, served to a browser."""

import getpass
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from attrs import define

from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.entrypoints.cli.parsing import flag_kinds, parse
from rollgrad.entrypoints.cli.places import take_places


@define(kw_only=True)
class UIArguments:
    """Serves a page that shows runs while they go on and afterwards. DIR is the directory of a run, or one below which
    there are runs; by default the newest run below runs/.

    The page's address is the one line on stdout. Nothing is written but stars, tags and notes (RUN/notes.jsonl).
    """

    port: int = 7890
    """Port to listen on; 0 picks a free one."""
    host: str = "127.0.0.1"
    """Interface to listen on. One that other machines reach needs a token."""
    token_file: Path | None = None
    """File with the token that the page must send (default: the variable ROLLGRAD_TOKEN, else none)."""


def serve_runs(arguments: Sequence[str]) -> None:
    """`rollgrad ui`: serves until SIGTERM.

    Raises:
        KeyboardInterrupt: SIGINT.
        RollgradError: a word is wrong, there is no run, or the address cannot be served.
    """
    places, words = take_places(arguments, flag_kinds(UIArguments))
    parsed = parse(UIArguments(), "ui", words)
    if len(places) > 1:
        raise ConfigurationError(
            f"ui takes one directory, but there are {', '.join(places)}: name the one that holds these runs."
        )
    named = next(iter(places), None)
    from rollgrad.adapters.servers.ui import serve_ui
    from rollgrad.entrypoints.ui.runs import Runs, newest_run
    from rollgrad.entrypoints.ui.without_pandas import WithoutPandas

    root = newest_run() if named is None else Path(named)
    if not root.is_dir():
        raise DataError(f"{str(root)!r} is no directory: name that of a run, or one below which there are runs.")
    sys.stderr.write(f"showing {root}\n")

    def started(url: str, guarded: bool) -> None:
        sys.meta_path.insert(0, WithoutPandas())
        threading.Thread(target=runs.read_ahead, name="reads ahead").start()
        if guarded:
            sys.stderr.write(f"open {url}/#token=... with the token in place of the dots\n")
        sys.stderr.writelines(f"{line}\n" for line in tunnel(url, parsed.host))

    runs = Runs(root)
    serve_ui(
        runs,
        Path(__file__).resolve().parents[1] / "ui" / "static",
        host=parsed.host,
        port=parsed.port,
        token_file=parsed.token_file,
        started=started,
    )


def tunnel(url: str, host: str) -> list[str]:
    """Returns the command that makes the page's address reachable from the machine at the other end of an ssh session;
    none outside of one."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    if len(parts) != 4:
        return []
    port = url.rpartition(":")[2]
    return [f"from your machine: ssh -N -L {port}:{host}:{port} {getpass.getuser()}@{parts[2]}"]
