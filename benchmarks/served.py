"""A server of `rollgrad serve` in a process of its own, for the benchmarks whose clients are programs."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def served(words: Sequence[str]) -> Iterator[str]:
    """Starts `rollgrad serve` with these words on a free port, returns its address, and ends it.

    Raises:
        SystemExit: it ended before it served; the reason is on stderr.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "rollgrad.entrypoints.cli.main", "serve", *words, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            sys.exit(f"error: rollgrad serve {' '.join(words)} ended with {process.wait()}")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
