"""Scripts of the repository, run by a process that has made their imports (`tests.script_host`)."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class ScriptHost:
    """Runs scripts one after the other, below `folder`. They can import rollgrad, as where that is installed, and
    nothing else of the repository."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0
        self._process: subprocess.Popen[str] | None = None
        (folder / "path").mkdir()
        (folder / "path" / "rollgrad").symlink_to(ROOT / "rollgrad")

    def run(self, *words: str) -> str:
        """Runs a script, or `-m` and a module, with its arguments; returns what it printed.

        Raises:
            AssertionError: its exit status is not 0.
        """
        self._process = process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        self._runs += 1
        output = self._folder / f"output-{self._runs}"
        try:
            process.stdin.write("\t".join((str(output), *words)) + "\n")
            process.stdin.flush()
            status = process.stdout.readline().strip()
        except BaseException:  # the time of a test is over: the next one gets a process that answers
            self.close()
            raise
        printed = output.read_text()
        assert status == "0", printed[-4000:]
        return printed

    def close(self) -> None:
        """Ends the process, with a script that hangs."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _started(self) -> "subprocess.Popen[str]":
        outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of this suite
        path = str(self._folder / "path")
        ours = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
        return subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "script_host.py")],
            cwd=ROOT,
            env={**outer, **ours},
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
