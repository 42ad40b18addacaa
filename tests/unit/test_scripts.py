"""A program that the suite's host runs is, for who starts it, like one that Python runs."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forked_spawns import forked_by
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
STARTS = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: None)  # goes on; what it starts does not
sys.exit(subprocess.call([sys.executable, "-IS", "-c", sys.argv[1]]))
"""
SPAWNS = """
import json, multiprocessing, os, sys

def tell(queue, said):
    process, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    queue.put([said, process.name, parent.pid, os.environ["COLOUR"], "colorsys" in sys.modules])
    sys.exit(3)

if __name__ == "__main__":
    os.environ["COLOUR"] = "red"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=tell, args=(queue, "hello"), name="Child")
    process.start()
    said, name, parent, colour, imported = queue.get()
    process.join()
    print(json.dumps([said, name, parent == os.getpid(), colour, process.exitcode]))
    print(imported)
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


def test_a_program_imports_from_its_own_path_but_not_from_the_repository(host: ScriptHost, tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "says.py").write_text("import importlib.util; print(importlib.util.find_spec('benchmarks'))")
    (tmp_path / "starts.py").write_text("import says")
    path = os.pathsep.join([str(tmp_path / "beside"), str(ROOT)])
    assert host.run(str(tmp_path / "starts.py"), variables={"PYTHONPATH": path}) == "None\n"


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


def test_what_a_program_starts_hears_ctrl_c(host: ScriptHost) -> None:
    with subprocess.Popen([*host.python(), "-c", STARTS, WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "goodbye\n"
    assert process.returncode == 130


@pytest.fixture
def spawning_host(tmp_path: Path) -> Iterator[ScriptHost]:
    host = ScriptHost(tmp_path, modules=("forked_spawns", "colorsys"))
    yield host
    host.close()


def test_a_host_within_another_has_the_imports_of_both(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("outer", "inner")]
    for folder in folders:
        folder.mkdir()
    outer = ScriptHost(folders[0], modules=("colorsys",))
    inner = ScriptHost(folders[1], modules=("forked_spawns", "plistlib"), within=outer)
    try:
        assert inner.run("-c", "import sys; print({'colorsys', 'plistlib'} <= sys.modules.keys())") == "True\n"
    finally:
        inner.close()
        outer.close()


def test_what_a_program_spawns_is_a_fork(spawning_host: ScriptHost, tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    theirs, ours = (
        subprocess.run(
            [*python, tmp_path / "spawns.py"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for python in ([sys.executable], spawning_host.python())
    )
    assert json.loads(ours[0]) == json.loads(theirs[0]) == ["hello", "Child", True, "red", 3]
    assert (ours[1], theirs[1]) == ("True", "False"), "it has the host's modules"


def test_what_this_process_spawns_is_a_fork(spawning_host: ScriptHost, monkeypatch: pytest.MonkeyPatch) -> None:
    before = multiprocessing.get_context("spawn")
    with forked_by(spawning_host.python()):
        monkeypatch.setenv("COLOUR", "green")
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=tell_of_spawning, args=(queue,))
        process.start()
        assert queue.get(timeout=60) == ("green", True, "ForkedContext")
        process.join()
    assert multiprocessing.get_context("spawn") is before


def test_who_spawns_forks_already_does_so_afterwards(
    spawning_host: ScriptHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOUR", "green")
    (tmp_path / "inner").mkdir()
    with forked_by(spawning_host.python()):
        inner = ScriptHost(tmp_path / "inner", modules=("forked_spawns",))
        with forked_by(inner.python()):
            pass
        inner.close()
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=tell_of_spawning, args=(queue,))
        process.start()
        assert queue.get(timeout=60) == ("green", True, "ForkedContext"), "of the outer host, which has colorsys"
        process.join()


def tell_of_spawning(queue: "multiprocessing.Queue[Any]") -> None:
    own = type(multiprocessing.get_context("spawn")).__name__  # what it spawns is a fork, too
    queue.put((os.environ["COLOUR"], "colorsys" in sys.modules, own))


def test_benchmarks_that_a_program_starts_are_programs_too(tmp_path: Path) -> None:
    """Other Python that it starts is Python itself, and so is what they start."""
    (tmp_path / "host").mkdir()
    (tmp_path / "benchmarks").mkdir()
    says = "import sys; print('colorsys' in sys.modules, sys.executable)"
    (tmp_path / "benchmarks" / "says.py").write_text(says)
    starts = "import os, subprocess, sys; os.chdir(sys.argv[1]); subprocess.run([sys.executable, *sys.argv[2:]])"
    host = ScriptHost(tmp_path / "host", modules=("colorsys",))
    try:
        for words, forked in ((("benchmarks/says.py",), True), (("-c", says), False)):
            said = host.run("-c", starts, str(tmp_path), *words, variables=host.forks())
            assert said == f"{forked} {sys.executable}\n"
    finally:
        host.close()


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
