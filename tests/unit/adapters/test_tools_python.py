"""The Python tool with real processes: what works, and everything that must not."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.sandbox import code_run, syscalls
from rollgrad.adapters.tools.python import PythonTool
from rollgrad.application.settings.sections.agent import PythonIsolation
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.errors import ConfigurationError, EngineError

CONTAINED = code_run.namespaces_problem() is None
SYSTEM_PYTHON = "/usr/bin/python3"
MARK = "rollgrad_test_"
"""Begins the name that a test's processes carry as an argument, by which they are found."""
RUNS = MARK + uuid.uuid4().hex
"""Argument of all runs of this test process, by which they are told from those of others."""


@pytest.fixture(autouse=True)
def _marked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    command = code_run.command
    monkeypatch.setattr(code_run, "command", lambda script: [*command(script), RUNS])


@pytest.fixture(params=["namespaces", "no_namespaces"] if CONTAINED else ["no_namespaces"])
def namespaces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    """Runs a test in every way that this machine can contain code."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if request.param == "no_namespaces":
        for part in (folder, *folder.parents):  # root's code becomes nobody, who must reach its directory
            if part.stat().st_uid == os.getuid():
                part.chmod(part.stat().st_mode | 0o011)
        if os.getuid() == 0 and not code_run.nobody_reads_python():
            command = code_run.command
            monkeypatch.setattr(code_run, "command", lambda script: [SYSTEM_PYTHON, *command(script)[1:]])
            monkeypatch.setattr(code_run, "nobody_reads_python", lambda: True)
    return bool(request.param == "namespaces")


def make(namespaces: bool, **settings: Any) -> PythonTool:
    return PythonTool(isolation=PythonIsolation.NAMESPACES if namespaces else PythonIsolation.NONE, **settings)


@pytest.fixture
def run(namespaces: bool) -> Callable[..., ToolResult]:
    def call(code: str, **settings: Any) -> ToolResult:
        return asyncio.run(make(namespaces, **{"seconds": 120.0, **settings}).call({"code": code}))

    return call


@pytest.fixture
def server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def with_argument(mark: str) -> list[int]:
    """Processes with `mark` in their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def sandboxes() -> list[int]:
    """The processes of this test process's runs, forks included, whoever has adopted them."""
    return with_argument(RUNS)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42"),
        ("6 * 7", "42"),
        ("x = 6\nx * 7", "42"),
        ("'häß 漢'", "'häß 漢'"),
        ("x = 42", "(no output)"),
        ("None", "(no output)"),
        ("", "(no output)"),
        ("import sys; print('a'); print('b', file=sys.stderr); 'c'", "a\nb\n'c'"),
        ("def f():\n    return __name__\nf()", "'__main__'"),
        ("import json, math, re, hashlib, sqlite3, decimal; json.dumps([math.pi])", "'[3.141592653589793]'"),
        ("print(1)\nquit()", "1"),
        ("import sys; sys.exit(0)", "(no output)"),
        (  # an import may know the directory as it was in the same tick of the clock
            "open('a.py', 'w').write('b = 5')\nimport importlib; importlib.invalidate_caches()\nimport a\na.b",
            "5",
        ),
        ("import multiprocessing\nwith multiprocessing.Pool(2) as p: print(p.map(abs, [-1, 2]))", "[1, 2]"),
        ("import subprocess, sys; subprocess.check_output(['/bin/echo', 'hi'])", "b'hi\\n'"),
        ("import os; [os.getcwd() == os.environ['HOME'], os.listdir()]", "[True, []]"),
        ("input()", "Traceback"),
    ],
)
def test_code_runs(run: Callable[..., ToolResult], code: str, output: str) -> None:
    result = run(code)
    if output == "Traceback":
        assert result.is_error
        assert result.content.endswith("EOFError: EOF when reading a line")
    else:
        assert result == ToolResult(content=output)


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("print('before')\nraise ValueError('häß')", "ValueError: häß"),
        ("x =", "SyntaxError: invalid syntax"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("import sys; sys.exit('bye')", "bye"),
        ("import sys; sys.exit(3)", "The code ended with status 3."),
        ("import os; os._exit(1)", "The code ended with status 1."),
        ("import os; os.abort()", "The code was killed by SIGABRT."),
        ("import os; os.kill(0, 9)", "The code was killed by SIGKILL."),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_errors_are_told(run: Callable[..., ToolResult], code: str, last: str) -> None:
    result = run(code)
    assert result.is_error
    assert result.content.splitlines()[-1] == last
    assert "sandbox" not in result.content


def test_a_traceback_shows_the_lines_of_the_code(run: Callable[..., ToolResult]) -> None:
    lines = run("def f(x):\n    return 1 / x\nf(0)").content.splitlines()
    assert lines[:3] == ["Traceback (most recent call last):", '  File "<code>", line 3, in <module>', "    f(0)"]


@pytest.mark.parametrize(
    "code",
    [
        "print('began')\nwhile True: pass",
        "import time\nprint('began')\ntime.sleep(600)",
        "from threading import *\nfor _ in range(5): Thread(target=Event().wait).start()\nprint('began')",
        "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nprint('began')\nwhile True: pass",
        "import os\nprint('began')\nos.setsid() if os.fork() == 0 else 0\nwhile True: pass",
    ],
)
def test_the_deadline_ends_everything(run: Callable[..., ToolResult], code: str) -> None:
    for seconds in (0.3, 3, 30, 300):  # on a busy machine it begins late
        result = run(code, seconds=seconds)
        assert sandboxes() == []
        if result.content.startswith("began"):
            break
    told = f"began\nThe code was stopped: it may run for {seconds:g} s."
    assert result == ToolResult(content=told, is_error=True)


def test_gigabytes_are_refused(run: Callable[..., ToolResult]) -> None:
    result = run("print('began')\nx = bytearray(4 << 30)", memory_mb=256)
    assert result.is_error
    assert result.content.endswith("MemoryError\nThe code may use 256 MB of memory.")


def test_memory_in_small_pieces_is_bounded_too(run: Callable[..., ToolResult]) -> None:
    result = run("x = []\nwhile True: x.append(bytes(1 << 20))", memory_mb=128)
    assert result.is_error
    assert "The code may use 128 MB of memory." in result.content


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os\nos.closerange(0, 99)\nwhile True:\n    try: os.fork() or os.setsid()\n    except OSError: pass",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
    ],
)
def test_bombs_are_bounded_and_leave_nothing(run: Callable[..., ToolResult], code: str) -> None:
    assert run(code, seconds=0.7).is_error
    assert sandboxes() == []


def test_a_process_that_runs_away_from_its_parents_does_not_survive(run: Callable[..., ToolResult]) -> None:
    mark = MARK + uuid.uuid4().hex
    code = (
        "import os\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        os.execv('/bin/sh', ['sh', '-c', 'sleep 600; true', {mark!r}])\n"
        "    os._exit(0)\n"
        "os.wait(), 1"
    )
    assert not run(code).is_error
    assert with_argument(mark) == []


def test_a_chain_of_processes_that_never_ends_does_not_survive(run: Callable[..., ToolResult]) -> None:
    run("import os\nwhile True:\n    if os.fork(): os._exit(0)\n    os.setsid()")
    assert sandboxes() == []


def test_a_flood_keeps_head_and_tail_and_counts_the_rest(run: Callable[..., ToolResult]) -> None:
    result = run("print('é' * 100_000 + 'end')", output_chars=100)
    assert result == ToolResult(
        content="é" * 50 + f"\n[... {100_000 + 4 - 100} characters left out ...]\n" + "é" * 46 + "end"
    )


def test_an_endless_flood_is_stopped(run: Callable[..., ToolResult]) -> None:
    result = run("while True: print('x' * 10_000)", seconds=60.0, output_chars=100)
    assert result.is_error
    assert result.content.endswith("The code was stopped: it printed over 8 MB.")
    assert len(result.content) < 250
    assert sandboxes() == []


def test_bytes_that_are_no_text_are_shown_somehow(run: Callable[..., ToolResult]) -> None:
    assert run("import os; os.write(1, b'a\\xff\\xc3'); print()").content == "a\ufffd\ufffd"


@pytest.mark.parametrize("code", ["import os; os.close(1); os.close(2)", "import sys; sys.stdout.close()"])
def test_closing_the_output_is_harmless(run: Callable[..., ToolResult], code: str) -> None:
    assert run(f"print('kept')\n{code}\nx = 1") == ToolResult(content="kept")


def test_the_environment_has_no_secret(run: Callable[..., ToolResult], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("PYTHONPATH", "/hunter2")
    result = run("import os, sys; print(sorted(os.environ), os.environ, sys.path)")
    assert "hunter2" not in result.content
    names = ["HOME", "LANG", "MALLOC_ARENA_MAX", "PATH", "PYTHONDONTWRITEBYTECODE", "TMPDIR"]
    assert result.content.startswith(str(names))


def test_files_of_the_parent(
    run: Callable[..., ToolResult], namespaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private file, in the parent's working directory: contained with namespaces, and by permissions under root."""
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    secret.chmod(0o600)
    monkeypatch.chdir(tmp_path)
    result = run(f"print(open({str(secret)!r}).read())")
    assert ("hunter2" in result.content) == (not namespaces and os.getuid() != 0)
    assert run("print(open('secret.txt').read())").is_error


def test_files_of_everybody(run: Callable[..., ToolResult], namespaces: bool) -> None:
    result = run("import os; [os.path.exists('/etc/passwd'), os.path.exists('/proc/1'), os.path.exists('/sys')]")
    assert result.content == ("[False, False, False]" if namespaces else "[True, True, True]")


def test_installed_packages_are_not_there(run: Callable[..., ToolResult], namespaces: bool) -> None:
    import attrs

    result = run(f"import os; os.path.exists({attrs.__file__!r})")
    assert result.content == ("False" if namespaces or not sandbox_reads(attrs.__file__) else "True")


def sandbox_reads(path: str) -> bool:
    """Returns whether code without namespaces may reach a file: root's code is nobody."""
    return os.getuid() != 0 or all(part.stat().st_mode & 0o001 for part in Path(path).parents)


def test_the_network(run: Callable[..., ToolResult], namespaces: bool, server: int) -> None:
    result = run(f"import socket; socket.create_connection(('127.0.0.1', {server}), 5); 'connected'")
    assert result.is_error == namespaces
    assert result.content.endswith("Network is unreachable" if namespaces else "'connected'")


def test_other_processes(run: Callable[..., ToolResult], namespaces: bool) -> None:
    victim = subprocess.Popen(["sleep", "600"])
    try:
        result = run(f"import os; os.kill({victim.pid}, 0)")
        contained = namespaces or os.getuid() == 0
        assert result.is_error == contained
    finally:
        victim.kill()
        victim.wait()


def test_no_privilege_is_kept(run: Callable[..., ToolResult], namespaces: bool) -> None:
    result = run("import os; print(os.getuid(), os.getgid() if os.getuid() == 65534 else 65534)\nos.chroot('/tmp')")
    assert result.content.startswith(f"{os.getuid() or 65534} 65534\n")
    assert result.content.endswith("Operation not permitted: '/tmp'")


@pytest.mark.parametrize("path", ["/x", "/usr/lib/x", "/etc/x"])
def test_nothing_outside_the_directory_is_written(run: Callable[..., ToolResult], namespaces: bool, path: str) -> None:
    if os.getuid() == 0 or not namespaces or path.startswith("/usr"):
        assert run(f"open({path!r}, 'w')").is_error
    else:  # an empty file system of the run's own
        run(f"open({path!r}, 'w')")
    assert not Path(path).exists()


def test_huge_files_are_refused(run: Callable[..., ToolResult]) -> None:
    result = run("file = open('huge', 'wb')\nwhile True: file.write(bytes(1 << 20))")
    assert result.is_error
    assert "File too large" in result.content or "No space left on device" in result.content


def test_many_files_together_are_bounded_with_namespaces(run: Callable[..., ToolResult], namespaces: bool) -> None:
    result = run("for n in range(80): open(str(n), 'wb').write(bytes(1 << 20))")
    assert result.is_error == namespaces
    assert result.content.endswith("No space left on device" if namespaces else "(no output)")


def test_open_files_are_bounded(run: Callable[..., ToolResult]) -> None:
    result = run("files = [open('/dev/null') for _ in range(1000)]")
    assert "Too many open files" in result.content


def test_the_directory_is_gone_afterwards(run: Callable[..., ToolResult], namespaces: bool) -> None:
    before = set(Path(tempfile.gettempdir()).iterdir())
    place = run("import os; os.makedirs('a/b'); open('a/b/c', 'w').write('x'); print(os.getcwd())").content.strip()
    assert set(Path(tempfile.gettempdir()).iterdir()) - before == set()
    assert namespaces or not Path(place).exists()
    run("import time; open('a', 'w').write('x')\ntime.sleep(600)", seconds=0.5)
    assert set(Path(tempfile.gettempdir()).iterdir()) - before == set()


async def test_a_cancelled_call_kills_its_processes(namespaces: bool) -> None:
    mark = MARK + uuid.uuid4().hex
    code = f"import subprocess; subprocess.run(['/bin/sh', '-c', 'sleep 600; true', {mark!r}])"

    calling = asyncio.create_task(make(namespaces, seconds=60.0).call({"code": code}))
    async with asyncio.timeout(300.0):
        while not with_argument(mark):
            await asyncio.sleep(0.01)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert with_argument(mark) == []
    assert sandboxes() == []


def test_runs_end_with_the_process_that_asked_for_them(namespaces: bool) -> None:
    mark = MARK + uuid.uuid4().hex
    code = f"import subprocess; subprocess.run(['/bin/sh', '-c', 'sleep 600; true', {mark!r}])"
    request = code_run._request(code, 60.0, 512, namespaces)
    guard = subprocess.Popen(
        code_run.command(code_run.CHILD),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=code_run.ENVIRONMENT,
    )
    assert guard.stdin is not None
    guard.stdin.write(request)
    guard.stdin.flush()
    while not with_argument(mark):
        time.sleep(0.01)
    guard.stdin.close()  # what the kernel does for a process that is gone
    guard.wait(300)
    assert with_argument(mark) == []


@pytest.mark.chaos
async def test_a_killed_guard_is_an_error_and_takes_its_namespaces_with_it() -> None:
    if not CONTAINED:
        assert code_run.namespaces_problem() is not None
        return
    mark = MARK + uuid.uuid4().hex
    code = f"import subprocess; subprocess.run(['/bin/sh', '-c', 'sleep 600; true', {mark!r}])"

    calling = asyncio.create_task(PythonTool(seconds=60.0).call({"code": code}))
    async with asyncio.timeout(300.0):
        while not with_argument(mark):
            await asyncio.sleep(0.01)
        (guard,) = (pid for pid in sandboxes() if _parent(pid) == os.getpid())
        os.kill(guard, signal.SIGKILL)
        with pytest.raises(EngineError, match="sandbox of the python tool failed"):
            await calling
    assert with_argument(mark) == []


async def test_at_most_so_many_run_at_once_and_the_loop_goes_on(namespaces: bool) -> None:
    most, ticks = 0, 0

    async def scenario() -> list[ToolResult]:
        nonlocal most, ticks
        tool = make(namespaces, processes=2)
        codes = [f"import time; time.sleep(0.2); print({n})" for n in range(6)]
        calls = asyncio.gather(*(tool.call({"code": code}) for code in codes))
        while not calls.done():
            await asyncio.sleep(0.005)
            ticks += 1
            most = max(most, sum(_parent(pid) == os.getpid() for pid in sandboxes()))
        return list(await calls)

    assert [result.content for result in await scenario()] == [str(n) for n in range(6)]
    assert most == 2
    assert ticks > 6


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def test_a_sandbox_that_breaks_is_logged_and_no_mistake_of_code_that_is_shut_in(
    run: Callable[..., ToolResult], namespaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_run, "command", lambda script: [sys.executable, "-c", "raise OSError('hunter2')"])
    with capture_logs() as logs:
        if namespaces:
            with pytest.raises(EngineError, match="sandbox_failed"):
                run("1")
        else:
            assert run("1") == ToolResult(content="The tool 'python' failed.", is_error=True)
    (log,) = [log for log in logs if log["event"] == "sandbox_failed"]
    assert "hunter2" in log["details"]


def test_where_namespaces_fail_the_tool_is_refused_unless_a_flag_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [sys.executable, "-c", "raise OSError('unshare: no')"]
    monkeypatch.setattr(code_run, "command", lambda script: broken)
    monkeypatch.setattr(code_run, "namespaces_problem", code_run.namespaces_problem.__wrapped__)
    with pytest.raises(ConfigurationError, match=r"OSError: unshare: no.*Docker: .*--python_isolation none"):
        PythonTool(flag="--python_isolation")
    monkeypatch.setattr(code_run, "nobody_reads_python", lambda: True)
    with capture_logs() as logs:
        PythonTool(isolation=PythonIsolation.NONE)
    assert [log["event"] for log in logs] == ["python_tool_without_namespaces"]


def test_root_needs_a_python_that_nobody_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_run, "nobody_reads_python", lambda: False)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(ConfigurationError, match="65534"):
        PythonTool(isolation=PythonIsolation.NONE)


REFUSED = {
    "a user namespace": "libc.unshare(0x10000000)",
    "a user namespace of a child": "libc.syscall(CLONE, 0x10000011, 0, 0, 0, 0)",
    "clone3": "libc.syscall(435, bytes(88), 88)",
    "a mount": "libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)",
    "io_uring": "libc.syscall(425, 8, bytes(120))",
    "userfaultfd": "libc.syscall(323 if x86 else 282, 1)",
    "a keyring": "libc.syscall(250 if x86 else 219, 0, -3, 1)",
    "ptrace": "libc.ptrace(0, 0, 0, 0)",
    "another's memory": "libc.process_vm_readv(1, bytes(16), 1, bytes(16), 1, 0)",
    "another's limits": "libc.prlimit(1, 7, None, bytes(16))",
    "memory in a file": "libc.memfd_create(b'x', 0)",
    "shared memory": "libc.shmget(0, 4096, 0o1600)",
    "messages": "libc.msgget(0, 0o1600)",
    "bpf": "libc.syscall(321 if x86 else 280, 0, bytes(64), 64)",
    "performance events": "libc.syscall(298 if x86 else 241, bytes(128), 0, -1, -1, 0)",
    "personality": "libc.personality(0x0040000)",
    "netlink": "libc.socket(16, 3, 0)",
    "packets": "libc.socket(17, 3, 0)",
    "vsock": "libc.socket(40, 1, 0)",
    "Bluetooth": "libc.socket(31, 1, 0)",
    "larger sockets": "libc.setsockopt(libc.socket(1, 1, 0), 1, 7, bytes(4), 4)",
    "larger sockets by force": "libc.setsockopt(libc.socket(1, 1, 0), 1, 32, bytes(4), 4)",
}
"""System calls that a model's code has no use for, each as an expression that is -1 where the call is refused."""


def test_system_calls_that_attacks_use_are_refused(run: Callable[..., ToolResult]) -> None:
    code = (
        "import ctypes, errno, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "x86 = os.uname().machine == 'x86_64'\n"
        "CLONE = 56 if x86 else 220\n"
        "def attempt(call):\n"
        "    ctypes.set_errno(0)\n"
        "    return eval(call), errno.errorcode.get(ctypes.get_errno())\n"
        f"for name, call in {REFUSED!r}.items(): print(name, *attempt(call), sep=': ')"
    )
    answers = dict(line.split(": ", 1) for line in run(code).content.splitlines())
    expected = dict.fromkeys(REFUSED, "-1: EPERM") | {"clone3": "-1: ENOSYS"}
    assert answers == expected


def test_every_system_call_of_the_table_is_refused(run: Callable[..., ToolResult]) -> None:
    place = list(syscalls.MACHINES).index(os.uname().machine)
    numbers = {name: found[place] for name, found in syscalls.NEVER.items() if found[place] is not None}
    code = (
        "import ctypes, errno\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def refused(number):\n"
        "    ctypes.set_errno(0)\n"
        "    return libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM\n"
        f"print([name for name, number in {numbers!r}.items() if not refused(number)])"
    )
    assert run(code).content == "[]"


HEADERS = (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h"))
"""Debian's headers with the numbers of x86_64 and aarch64, which may be older than some calls."""


@pytest.mark.skipif(not all(header.exists() for header in HEADERS), reason="this machine has no headers of Linux")
def test_numbers_of_system_calls_are_those_of_linux() -> None:
    known = [dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())) for header in HEADERS]
    tables = {
        **syscalls.NEVER,
        **syscalls.JUDGED,
        "clone": syscalls.CLONE,
        "clone3": syscalls.CLONE3,
        "prlimit64": syscalls.PRLIMIT64,
        "socket": syscalls.SOCKET,
        "setsockopt": syscalls.SETSOCKOPT,
        "open": syscalls.OPEN,
        "openat": syscalls.OPENAT,
        "openat2": syscalls.OPENAT2,
    }
    for name, numbers in tables.items():
        for number, header in zip(numbers, known, strict=True):
            assert header.get(name, str(number)) == str(number), name


def test_memory_of_all_processes_together_is_bounded(run: Callable[..., ToolResult]) -> None:
    code = (
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(b'x') * (200 << 20)\n"
        "        time.sleep(600)\n"
        "time.sleep(600)"
    )
    result = run(code, memory_mb=256, seconds=300.0)
    told = "The code was stopped: its processes may use 256 MB of memory together."
    assert result == ToolResult(content=told, is_error=True)
    assert sandboxes() == []


@pytest.mark.skipif(not CONTAINED, reason="sockets are counted where the code has a network of its own")
def test_memory_that_sockets_hold_counts_too() -> None:
    code = (
        "import os, socket, time\n"
        "for _ in range(40):\n"
        "    if os.fork() == 0:\n"
        "        sockets = [one for _ in range(50) for one in socket.socketpair()]\n"
        "        for one in sockets:\n"
        "            one.setblocking(False)\n"
        "            try:\n"
        "                while True: one.send(bytes(1 << 16))\n"
        "            except BlockingIOError: pass\n"
        "        time.sleep(600)\n"
        "time.sleep(600)"
    )
    result = asyncio.run(make(True, memory_mb=512, seconds=300.0).call({"code": code}))
    told = "The code was stopped: its processes may use 512 MB of memory together."
    assert result == ToolResult(content=told, is_error=True)


def test_programs_with_a_few_sockets_run(run: Callable[..., ToolResult]) -> None:
    code = (
        "import asyncio, multiprocessing\n"
        "async def main():\n"
        "    left, right = multiprocessing.Pipe()\n"
        "    left.send('sent')\n"
        "    print(await asyncio.to_thread(right.recv))\n"
        "asyncio.run(main())"
    )
    assert run(code, memory_mb=128) == ToolResult(content="sent")


def test_memory_that_processes_share_counts_once(run: Callable[..., ToolResult]) -> None:
    code = (
        "import os, time\n"
        "x = bytearray(b'x') * (150 << 20)\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(1)\n"
        "        os._exit(0)\n"
        "for _ in range(6): os.wait()\n"
        "print('ended')"
    )
    assert run(code, memory_mb=256) == ToolResult(content="ended")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_to_init_are_nothing(run: Callable[..., ToolResult], namespaces: bool, number: int) -> None:
    if namespaces:
        assert run(f"import os; os.kill(1, {number})\nprint('still here')") == ToolResult(content="still here")


def test_without_namespaces_the_memory_of_this_process_is_closed(
    namespaces: bool, run_script: Callable[..., str]
) -> None:
    probe = (
        "import ctypes\n"
        "from rollgrad.adapters.sandbox import code_run\n"
        "from rollgrad.adapters.tools.python import PythonTool\n"
        "from rollgrad.application.settings.sections.agent import PythonIsolation\n"
        "code_run.nobody_reads_python = lambda: True\n"
        f"PythonTool(isolation=PythonIsolation.{'NAMESPACES' if namespaces else 'NONE'})\n"
        "print(ctypes.CDLL(None).prctl(3))"
    )
    assert run_script("-c", probe).splitlines()[-1] == ("1" if namespaces else "0")


@pytest.mark.parametrize("setting", [{"seconds": 0.0}, {"memory_mb": 10}, {"output_chars": 1}, {"processes": 0}])
def test_numbers_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"python tool has {next(iter(setting))}="):
        PythonTool(**setting)
