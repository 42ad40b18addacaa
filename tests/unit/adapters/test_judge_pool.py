"""Judges in the sandbox, with a judge that runs the reply as code: what a reply that got so far can do."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from rollgrad.adapters.rewards import format_worker, judge_pool
from rollgrad.adapters.rewards.judge_pool import JudgePool, Verdict
from rollgrad.adapters.sandbox import code_run, syscalls, walls
from rollgrad.application.settings.sections.reward import JudgeIsolation
from rollgrad.domain.errors import ConfigurationError, RewardError
from tests.fakes import hostile_judge

TIMEOUT = 60.0
SHORT = 0.3
WAYS = ["namespaces"] * (code_run.namespaces_problem() is None) + ["landlock"] * (walls.landlock_version() > 0)
FAILED = Verdict(failed=True)
RECURSION = """
import sys; sys.setrecursionlimit(10 ** 9)
exec("def f(): " + " = ".join(f"x{n}" for n in range(1000)) + " = f()")
f()
"""
"""A call in a call without end; each has many variables, so that memory ends soon."""


@pytest.fixture(scope="module", params=WAYS)
def pool(request: pytest.FixtureRequest) -> Iterator[JudgePool]:
    """In each way that this machine can shut a judge in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge_pool, "_walls", lambda: request.param)
        patch.setattr(judge_pool, "MEMORY_MB", 128)
        made = JudgePool(hostile_judge, timeout=TIMEOUT)
    yield made
    made.close()


def attempt(pool: JudgePool, code: str) -> Verdict:
    return asyncio.run(pool.judge(hostile_judge.attempt, code))


def test_every_machine_of_the_tests_can_shut_judges_in() -> None:
    assert WAYS


@pytest.mark.parametrize(
    "code",
    [
        *("open('/etc/passwd')", "import os; os.listdir('/proc')", "open('/etc/hostname')"),
        *("open('x', 'w')", "open('/tmp/x', 'w')", "open('/dev/shm/x', 'w')", "import tempfile; tempfile.mkdtemp()"),
        *("open(__import__('os').__file__, 'a')", "import os; os.chmod(os.__file__, 0o777)"),
        *("import os; os.unlink(os.__file__)", "import os; os.utime(os.__file__)", "import os; os.mkdir('/tmp/x')"),
        *("import socket; socket.socket()", "import socket; socket.socketpair()"),
        *(
            "import os; os.fork()",
            "import os; os.execv('/bin/sh', ['sh'])",
            "import os; os.posix_spawn('/bin/sh', [], {})",
        ),
        *("import threading; threading.Thread(target=print).start()", "import os; os.system('true') and 1 / 0"),
        *("import os; os.kill(os.getppid(), 9)", "import os; os.kill(1, 2)", "import os; os.kill(-1, 9)"),
        *("import os; os.memfd_create('x')", "import resource; resource.prlimit(os.getppid(), 7)"),
        *("import os; os.setpriority(0, os.getppid(), 19)", "import os; os.sched_setaffinity(os.getppid(), [0])"),
        "import ctypes, os; ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) + 1 or 1 / 0",
    ],
)
def test_what_a_judgement_cannot_do(pool: JudgePool, code: str) -> None:
    assert attempt(pool, code) == FAILED
    assert attempt(pool, "1") == Verdict(value=1.0)


def test_every_system_call_of_the_tables_is_refused_to_a_judgement(pool: JudgePool) -> None:
    place = list(syscalls.MACHINES).index(os.uname().machine)
    tables = {**syscalls.NEVER, **syscalls.JUDGED}
    numbers = {name: found[place] for name, found in tables.items() if found[place] is not None}
    code = (
        "import ctypes, errno\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {numbers!r}.items():\n"
        "    assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM, name\n"
    )
    assert attempt(pool, code) == Verdict(value=1.0)


def test_the_environment_is_empty(pool: JudgePool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {*code_run.ENVIRONMENT, *judge_pool.ONE_THREAD, "LC_CTYPE"}
    assert attempt(pool, f"import os; assert set(os.environ) <= {names!r}, os.environ") == Verdict(value=1.0)


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(8 << 30)",
        "x = []\nwhile 1: x.append(bytes(1 << 20))",
        "import mmap; mmap.mmap(-1, 8 << 30)",
        RECURSION,
        "eval('(' * 10 ** 6)",
        "import os; os._exit(0)",
        "import os; os.abort()",
        "import ctypes; ctypes.string_at(0)",
        "raise SystemExit('x' * 10 ** 7)",
        "raise KeyboardInterrupt",
        "class E(Exception):\n    def __repr__(self): raise self\nraise E",
        "import os\nfor n in range(3, 20):\n    try: os.write(n, b'v' * 10_000)\n    except OSError: 0\nos._exit(0)",
    ],
)
async def test_whatever_breaks_a_judgement_is_its_failure_alone(pool: JudgePool, code: str) -> None:
    fine = Verdict(value=1.0)
    asked = [code, "1", "1", code, "1"]
    assert list(await asyncio.gather(*(pool.judge(hostile_judge.attempt, each) for each in asked))) == [
        FAILED,
        fine,
        fine,
        FAILED,
        fine,
    ]


@pytest.mark.parametrize("number", [2.0, -1.0, float("nan"), float("inf"), 1e300])
async def test_a_value_out_of_range_is_a_failure(pool: JudgePool, number: float) -> None:
    assert await pool.judge(hostile_judge.value, number) == FAILED


def test_what_a_failed_judgement_changed_is_gone(pool: JudgePool) -> None:
    for _ in range(4):  # on every worker
        assert attempt(pool, "memory.append(1)\nimport builtins; builtins.float = lambda x: 1.0\n1 / 0") == FAILED
    for _ in range(4):
        assert attempt(pool, "assert not memory and float('0.5') == 0.5") == Verdict(value=1.0)


def test_megabytes_reach_the_judge(pool: JudgePool) -> None:
    assert attempt(pool, "#" * (20 << 20)) == Verdict(value=1.0)
    assert attempt(pool, "# \ud800") == FAILED  # no text that Python compiles


@pytest.mark.parametrize("way", WAYS)
def test_the_deadline_ends_a_judgement_and_the_next_goes_on(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_pool, "_walls", lambda: way)
    pool = JudgePool(hostile_judge, timeout=SHORT)
    for code in ("while True: pass", "import time; time.sleep(600)", "import os; os.close(3); os.close(4)\nwhile 1: 1"):
        assert not attempt(pool, code).value
    for _ in range(100):  # on a busy machine a process may begin late
        if attempt(pool, "1") == Verdict(value=1.0):
            break
    else:
        pytest.fail("nothing is judged after a deadline")
    pool.close()


def test_processes_end_with_the_pool() -> None:
    before = judges()
    pool = JudgePool(hostile_judge, timeout=TIMEOUT)
    assert attempt(pool, "1").value == 1.0
    started = judges() - before
    assert started
    pool.close()
    deadline = time.monotonic() + TIMEOUT
    while any(map(judging, started)):  # the innermost die a moment after the one that is killed
        assert time.monotonic() < deadline
        time.sleep(0.01)


def judges() -> set[psutil.Process]:
    """Processes of this one that run the judges' program; other test processes have judges of their own."""
    return {process for process in psutil.Process().children(recursive=True) if judging(process)}


def judging(process: psutil.Process) -> bool:
    try:
        return any("judge_child.py" in word for word in process.cmdline())
    except psutil.Error:
        return False


def test_a_killed_worker_is_replaced() -> None:
    pool = JudgePool(hostile_judge, timeout=TIMEOUT)
    assert attempt(pool, "1").value == 1.0
    for worker in pool._workers:
        if worker._process is not None:
            os.killpg(worker._process.pid, signal.SIGKILL)
    verdicts = [attempt(pool, "1") for _ in range(6)]
    assert verdicts.count(Verdict(value=1.0)) >= 4  # one a worker may be lost
    pool.close()


def test_a_closed_pool_says_so_and_waits_for_nobody() -> None:
    pool = JudgePool(hostile_judge, timeout=TIMEOUT)

    async def closing() -> list[Any]:
        asked = [
            asyncio.ensure_future(pool.judge(hostile_judge.attempt, "import time; time.sleep(600)")) for _ in "1234"
        ]
        await asyncio.sleep(0.5)
        pool.close()
        pool.close()
        return await asyncio.gather(*asked, return_exceptions=True)

    assert all(isinstance(answer, RewardError) for answer in asyncio.run(closing()))
    with pytest.raises(RewardError, match="not running: they were closed"):
        attempt(pool, "1")
    assert not [thread for thread in threading.enumerate() if thread in [w._thread for w in pool._workers]]


async def test_a_judge_that_cannot_start_is_an_error_that_says_why(tmp_path: Path) -> None:
    judge = ModuleType("broken")
    judge.__file__ = str(tmp_path / "broken.py")
    judge.PACKAGES, judge.EVALUATES = (), ()  # type: ignore[attr-defined]
    Path(judge.__file__).write_text("def warm_up(): import a_package_that_is_not_there")
    pool = JudgePool(judge, timeout=TIMEOUT)
    with pytest.raises(RewardError, match=r"not running: ModuleNotFoundError.*a_package_that_is_not_there"):
        await pool.judge(hostile_judge.attempt, "1")
    pool.close()


async def test_a_machine_that_cannot_shut_judges_in_is_told_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_pool, "_walls", judge_pool._walls.__wrapped__)
    monkeypatch.setattr(code_run, "namespaces_problem", lambda: "unshare: no")
    if walls.landlock_version() > 0:
        assert judge_pool._walls() == "landlock"
    monkeypatch.setattr(walls, "landlock_version", lambda: 0)
    with pytest.raises(ConfigurationError, match=r"unshare: no.*--reward.isolation none"):
        JudgePool(format_worker, timeout=TIMEOUT)
    pool = JudgePool(format_worker, timeout=TIMEOUT, isolation=JudgeIsolation.NONE)
    assert await pool.judge(format_worker.matches, "aa", common=("a+",)) == Verdict(value=1.0)
    pool.close()


def test_judges_import_nothing_of_this_process(pool: JudgePool) -> None:
    code = "import sys; assert not {'torch', 'pytest', 'rollgrad'} & set(sys.modules)"
    assert attempt(pool, code) == Verdict(value=1.0)
