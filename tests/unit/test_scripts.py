"""A program that the suite's host runs is, for who starts it, like one that Python runs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.scripts import ROOT, ScriptHost

SAYS = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ["COLOUR"], sys.stdin.read(), __name__]))
print("warned", file=sys.stderr)
sys.exit(3)
"""
WAITS = """
import atexit, signal, sys, time
atexit.register(print, "goodbye")
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ScriptHost]:
    host = ScriptHost(tmp_path, modules=())
    yield host
    host.close()


@pytest.mark.parametrize("kind", ["script", "-c", "-m"])
def test_a_program_is_as_one_that_python_runs(kind: str, host: ScriptHost, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    words = {"script": ["says.py"], "-c": ["-c", SAYS], "-m": ["-m", "says"]}[kind]
    theirs, ours = (
        subprocess.run(
            [*python, *words, "one", "two words"],
            cwd=tmp_path,
            env={**os.environ, "COLOUR": "blue"},
            input="asked",
            capture_output=True,
            text=True,
        )
        for python in ([sys.executable], host.python())
    )
    assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
    assert json.loads(ours.stdout)[1:] == [str(tmp_path), "blue", "asked", "__main__"]


@pytest.mark.parametrize("python_of", [lambda host: [sys.executable], ScriptHost.python], ids=["python", "host"])
@pytest.mark.parametrize(
    ("number", "status", "rest"), [(signal.SIGINT, 130, "goodbye\n"), (signal.SIGTERM, -signal.SIGTERM, "")]
)
def test_a_program_gets_signals(
    python_of: Callable[[ScriptHost], list[str]], number: signal.Signals, status: int, rest: str, host: ScriptHost
) -> None:
    with subprocess.Popen(
        [*python_of(host), "-c", WAITS],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=60)[0] == rest
    assert process.returncode == status


def test_a_program_ends_with_who_started_it(host: ScriptHost) -> None:
    code = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
    with subprocess.Popen([*host.python(), "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.stdout.read() == ""  # the program itself has closed its output


def test_the_host_ends_with_the_suite_that_started_it(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.scripts import ScriptHost;"
        "host = ScriptHost(Path(sys.argv[1]), modules=()); host.python();"
        "Path(sys.argv[1], 'pid').write_text(str(host._process.pid)); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    pid = int((tmp_path / "pid").read_text())
    hosts = [process for process in psutil.process_iter() if process.pid == pid]
    assert psutil.wait_procs(hosts, timeout=60)[1] == []


def test_a_program_whose_host_dies_fails_alone(host: ScriptHost) -> None:
    with pytest.raises(AssertionError, match="runs programs died at -c"):
        host.run("-c", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    assert host.run("-c", "print('alive')") == "alive\n"
    assert host._process is not None
    host._process.kill()
    host._process.wait()
    assert host.run("-c", "print('alive')") == "alive\n"
