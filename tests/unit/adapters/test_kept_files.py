"""The Python tool of an episode leaves files from one call to the next, and nothing to anybody else."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rollgrad.adapters.sandbox import code_run, kept_files
from rollgrad.adapters.tools.python import NOT_KEPT, PythonTool
from rollgrad.application.settings.sections.agent import PythonIsolation
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.errors import EngineError

WAYS = ["none", "namespaces"] if code_run.namespaces_problem() is None else ["none"]
ONE_WAY = pytest.mark.parametrize(
    "tool", [*(pytest.param(way, marks=pytest.mark.wide) for way in WAYS[:-1]), WAYS[-1]], indirect=True
)
"""For what takes seconds, and has little to do with how code is contained."""


@pytest.fixture(params=WAYS)
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PythonTool:
    """Returns the tool of a run, in each way in which this machine can contain code; its files go below `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if os.getuid() == 0 and request.param == "none":
        for part in (tmp_path, *tmp_path.parents):  # the code becomes nobody, who must reach its directory
            if part.stat().st_uid == 0:
                part.chmod(part.stat().st_mode | 0o011)
        if not code_run.nobody_reads_python():
            command = code_run.command
            monkeypatch.setattr(code_run, "command", lambda script: ["/usr/bin/python3", *command(script)[1:]])
            monkeypatch.setattr(code_run, "nobody_reads_python", lambda: True)
    return PythonTool(isolation=PythonIsolation(request.param), seconds=120.0, processes=2)


@pytest.fixture
async def say(tool: PythonTool) -> AsyncIterator[Callable[..., object]]:
    episode = tool.for_episode()

    async def call(code: str) -> str:
        return (await episode.call({"code": code})).content

    yield call
    await episode.close()


TREE = """
import os, stat, zlib
def tree():
    lines = []
    for folder, folders, files in os.walk("."):
        for name in folders + files:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if os.path.islink(path):
                said = os.readlink(path)
            else:
                is_folder = stat.S_ISDIR(status.st_mode)
                said = is_folder or (zlib.crc32(open(path, "rb").read()), status.st_mtime_ns)
            lines.append((path, oct(status.st_mode), said))
    print(*sorted(lines), sep="\\n")
"""


async def test_files_folders_links_modes_and_times_are_there_in_the_next_call(say: Callable[..., object]) -> None:
    written = await say(
        TREE
        + """
os.makedirs("a/b")
open("a/b/c.py", "w").write("x = 5")
open("empty", "w").close()
open("häß\\udcff", "wb").write(bytes(range(256)) * 1000)
os.symlink("a/b/c.py", "link"); os.symlink("/nowhere", "dangling"); os.symlink("a", "folder_link")
os.chmod("empty", 0o755); os.utime("empty", (1, 2)); os.chmod("a/b", 0o500)
tree()"""
    )
    assert "c.py" in str(written)
    assert "dangling" in str(written)
    assert await say(TREE + "tree()") == written
    assert await say("import runpy; runpy.run_path('link')['x']") == "5"
    assert await say("import os; os.remove('link'); sorted(os.listdir('.'))[-2:]") == "['folder_link', 'häß\\udcff']"
    assert await say("import os; os.path.lexists('link')") == "False"


async def test_a_test_that_failed_is_mended_by_a_later_call(say: Callable[..., object]) -> None:
    """A coding agent does this. Variables are gone."""
    test = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'unittest', '-q', 'test_sums']).returncode"
    await say("open('sums.py', 'w').write('def add(a, b):\\n    return a - b\\n')")
    await say(
        "open('test_sums.py', 'w').write('import unittest, sums\\nclass T(unittest.TestCase):\\n"
        "    def test_add(self): self.assertEqual(sums.add(2, 3), 5)\\n')"
    )
    assert str(await say(test)).endswith("\n1")
    await say("text = open('sums.py').read(); open('sums.py', 'w').write(text.replace('-', '+'))")
    assert str(await say(test)).endswith("OK\n0")
    assert str(await say("text")).endswith("NameError: name 'text' is not defined")


async def test_a_call_that_is_stopped_keeps_what_it_wrote(tool: PythonTool) -> None:
    tool._seconds = 2.0
    episode = tool.for_episode()
    stopped = await episode.call({"code": "import time; open('a', 'w').write('x'); time.sleep(600)"})
    assert stopped == ToolResult(content="The code was stopped: it may run for 2 s.", is_error=True)
    episode._seconds = 120.0
    assert (await episode.call({"code": "open('a').read()"})).content == "'x'"
    await episode.close()


async def test_episodes_share_nothing_and_leave_nothing(tool: PythonTool, tmp_path: Path) -> None:
    first, second = tool.for_episode(), tool.for_episode()
    await first.call({"code": f"open('secret', 'wb').write(b'hunter2' * {1 << 16})"})
    listing = {"code": "import os; os.listdir('.'), os.path.exists('secret')"}
    assert (await second.call(listing)).content == "([], False)"
    assert (await tool.call(listing)).content == "([], False)"
    assert (await first.call(listing)).content == "(['secret'], True)"
    assert list(tmp_path.iterdir()) == []  # so nothing is left when this process is killed
    await first.close()
    await first.close()
    await second.close()
    assert (await tool.call({"code": "open('a', 'w').write('x')"})).content == "1"
    assert (await tool.call(listing)).content == "([], False)"
    assert "keeps nothing" in tool.description
    assert "keeps the files" in first.description


async def test_calls_of_one_reply_follow_each_other(tool: PythonTool) -> None:
    episode = tool.for_episode()
    code = "import os, time; time.sleep(0.1 / (1 + len(os.listdir('.')))); open(str(len(os.listdir('.'))), 'w')\nNone"
    await asyncio.gather(*(episode.call({"code": code}) for _ in range(4)))
    assert (await episode.call({"code": "import os; sorted(os.listdir('.'))"})).content == "['0', '1', '2', '3']"
    await episode.close()


@pytest.mark.parametrize(
    "code",
    [
        "for n in range(3): open(str(n), 'wb').truncate(30 << 20)",
        f"for n in range({kept_files.MOST}): open(f'{{n:x}}', 'w').close()",
        "import os\nfor _ in range(2000): os.mkdir('aaa'); os.chdir('aaa')",
    ],
    ids=["sparse", "many", "deep"],
)
@ONE_WAY
async def test_too_many_or_too_large_files_are_not_kept_and_the_model_is_told(
    say: Callable[..., object], code: str
) -> None:
    await say("open('kept', 'w').write('x')")
    assert await say(code) == NOT_KEPT
    assert await say("import os; os.listdir('.')") == "['kept']"


@ONE_WAY
async def test_as_many_bytes_as_a_call_may_write_are_kept(say: Callable[..., object]) -> None:
    size = (kept_files.KEPT_MB << 20) - kept_files.PLACE
    await say(f"open('a', 'wb').write(b'x' * {size})")
    assert await say("import os; open('b', 'w').write('y'); os.path.getsize('a')") == str(size)
    assert await say("import os; os.path.getsize('a'), open('b').read()") == f"({size}, 'y')"


async def test_what_the_code_closes_to_itself_is_kept_as_it_is(say: Callable[..., object]) -> None:
    await say("import os; os.mkdir('d'); open('d/f', 'w').write('x'); os.chmod('d/f', 0); os.chmod('d', 0)")
    assert await say("import os; os.chmod('d', 0o700); oct(os.stat('d/f').st_mode)") == "'0o100000'"
    assert await say("import os; os.chmod('d/f', 0o600); open('d/f').read()") == "'x'"


async def test_special_files_are_left_out(say: Callable[..., object]) -> None:
    await say("import os, socket; os.mkfifo('pipe'); socket.socket(socket.AF_UNIX).bind('s'); open('f', 'w').close()")
    assert await say("import os; os.listdir('.')") == "['f']"


async def test_files_that_cannot_be_kept_fail_the_episode(tool: PythonTool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", _full)
    episode = tool.for_episode()
    await episode.call({"code": "open('small', 'w').write('x')"})
    with pytest.raises(EngineError, match=r"No space left on device.*TMPDIR"):
        await episode.call({"code": "open('large', 'wb').write(bytes(1 << 20))"})
    await episode.close()


def _full(*arguments: object, **named: object) -> object:
    raise OSError(28, "No space left on device")


def test_the_value_of_one_folder_makes_an_equal_one(tmp_path: Path) -> None:
    """It does so in a process of its own, too, without any isolation."""
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "a" / "b").mkdir(parents=True)
    (first / "a" / "b" / "c").write_bytes(b"1" * 100_000)
    second.mkdir()
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import kept_files\n"
        "os.chdir(sys.argv[2]); packed = kept_files.pack(1 << 20); assert kept_files.pack(1 << 16) is None\n"
        "os.chdir(sys.argv[3]); assert kept_files.pack(1 << 20) == b''; kept_files.unpack(packed)\n"
        "assert kept_files.pack(1 << 20) and kept_files.pack(1 << 16) is None; kept_files.unpack(b'')"
    )
    folder = str(Path(kept_files.__file__).parent)
    subprocess.run([sys.executable, "-I", "-S", "-c", script, folder, str(first), str(second)], check=True)
    assert (second / "a" / "b" / "c").read_bytes() == b"1" * 100_000
