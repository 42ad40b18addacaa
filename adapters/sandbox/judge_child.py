"""The program that judges replies: it imports a judge, shuts itself in, and forks processes that judge.

Started as a script by `judge_pool`, its other side, over a socket that is its stdin. A marshalled mapping says what to
start; each pickled request after that is answered before the next comes. A process that judges cannot start others,
reads the files of the interpreter and of installed packages, and changes none. One that evaluated more of a reply than
arithmetic, was stopped or broke down judges no other reply, so that nothing which a reply ran stays. What it writes as
its answer is passed on as bytes and never parsed here. Libraries that evaluate replies get the `eval` of `expressions`.

An answer is a status (one byte), a number (a double), and up to `TEXT_BYTES` of UTF-8 that say what failed.
"""

from __future__ import annotations

import contextlib
import gc
import marshal
import math
import os
import pickle
import resource
import select
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from rollgrad.adapters.sandbox import expressions, syscalls, walls
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import expressions
    import syscalls
    import walls

    del sys.path[0]

READY, VALUE, TIMED_OUT, FAILED = b"r", b"v", b"t", b"f"
ANSWER = struct.Struct("<cdH")
"""Status, number, and the length of the text that follows."""
TEXT_BYTES = 500
LINUX = sys.platform.startswith("linux")
"""Elsewhere judges run without walls, where that is asked for."""
FILES = 64
"""Open files of a judgement."""
PREPARED = 64
"""Preparations that are kept; more are made again in each process."""
JUDGEMENTS = 500
"""Of one process, so that what libraries keep in memory does not grow up to its limit."""
EVALUATES = b"!"
"""Written before an answer by a process that goes on to evaluate an expression of a reply."""


def main() -> NoReturn:
    """Starts a judge and serves requests until the other side closes."""
    connection = os.dup(0)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1):  # libraries that print must not answer
        os.dup2(null, standard)
    request = marshal.loads(receive(connection))
    try:
        sys.path += request["paths"]
        judge: Any = type(sys)("judge")
        exec(compile(request["source"], request["file"], "exec"), vars(judge))
        judge.warm_up()
        for name, module in list(sys.modules.items()):
            if name.startswith(judge.EVALUATES):
                vars(module)["eval"] = expressions.evaluate
        pid = os.fork()  # of libraries' threads none is left in it: a process with threads cannot enter namespaces
        if pid:
            os.close(connection)
            _, status = os.waitpid(pid, 0)
            os._exit(walls.exit_code(status))
        space = address_space() if LINUX else 0
        if request["walls"] == "namespaces":
            walls.enter_namespaces(request, writable=False)
            pid = walls.fork(lambda: serve(judge, connection, null, request, space))
            os.close(connection)
            _, status = os.waitpid(pid, 0)
            os._exit(walls.exit_code(status))
        serve(judge, connection, null, request, space)
    except BaseException as error:  # whatever keeps a judge from starting is told to who asked for it
        send(connection, FAILED, 0.0, repr(error))
    os._exit(1)


def serve(judge: Any, connection: int, null: int, request: dict[str, Any], space: int) -> NoReturn:
    """Answers requests, one at a time."""
    if request["walls"] == "namespaces":
        walls.end_with_parent()
    if request["walls"]:
        walls.give_up_privileges()
        walls.close_memory()
    if request["walls"] == "landlock":
        walls.read_only_files([*request["visible"], *walls.DEVICES])
    bounds = {
        **({resource.RLIMIT_AS: space + (request["memory_mb"] << 20)} if LINUX else {}),
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_CORE: 0,
    }

    def fork() -> Judging:
        asked, asking = os.pipe()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(null, 2)
            for descriptor in (connection, null, asking, reading):
                os.close(descriptor)
            if LINUX:
                walls.end_with_parent()
            walls.limit(bounds)
            if request["walls"]:
                syscalls.forbid(judged=True)
            work(judge, asked, writing)
        os.close(asked)
        os.close(writing)
        return Judging(pid, asking, reading)

    prepared: set[Any] = set()
    judging: Judging | None = None
    again = False
    gc.collect()
    gc.freeze()  # else the collector of each process would copy every page that holds an object
    send(connection, READY, 0.0, "")
    while True:
        question = receive(connection)
        common = pickle.loads(question)[1]
        if common and common not in prepared and len(prepared) < PREPARED:
            prepared.add(common)
            with contextlib.suppress(Exception):  # the judgement fails of the same, and tells it
                judge.prepare(*common)
            gc.freeze()
            again = False
        if judging is not None and not (again and judging.quiet()):
            judging.end()
            judging = None
        judging = judging or fork()
        answer, again = judging.ask(question, request["seconds"], connection)
        os.write(connection, answer)


def work(judge: Any, asked: int, writing: int) -> NoReturn:
    """Judges until nothing more is asked, in a process of its own."""
    expressions.announce.append(lambda: os.write(writing, EVALUATES))
    while True:
        name, common, arguments = pickle.loads(receive(asked))
        try:
            status, value, text = VALUE, float(getattr(judge, name)(*common, *arguments)), ""
        except BaseException as error:  # the reply may have made it raise anything
            status, value, text = FAILED, 0.0, repr(error)
        send(writing, status, value, text)


class Judging:
    """A process that judges, seen from the one that forked it."""

    def __init__(self, pid: int, asking: int, reading: int) -> None:
        self.pid = pid
        self.asking = asking
        self.reading = reading
        self.left = JUDGEMENTS
        os.set_blocking(asking, False)

    def ask(self, question: bytes, seconds: float, connection: int) -> tuple[bytes, bool]:
        """Returns the answer, and whether the process may judge again. Ends this program with the other side."""
        self.left -= 1
        deadline = time.monotonic() + seconds
        question = len(question).to_bytes(8, "little") + question
        data, alone = b"", False
        while len(data) < ANSWER.size or len(data) < ANSWER.size + ANSWER.unpack_from(data)[2]:
            room = [self.asking] if question else []
            wait = max(0.0, deadline - time.monotonic())
            ready, free, _ = select.select([self.reading, connection], room, [], wait)
            if connection in ready:  # nothing comes before it is answered, so the other side is gone
                os._exit(0)
            if not ready and not free:
                return ANSWER.pack(TIMED_OUT, 0.0, 0), False
            with contextlib.suppress(BrokenPipeError):  # it ended, as reading tells
                question = question[os.write(self.asking, question) :] if free else question
            if self.reading not in ready:
                continue
            part = os.read(self.reading, 1024)
            if not part or len(data) > ANSWER.size + TEXT_BYTES:
                return packed(FAILED, 0.0, "its process ended or answered at length"), False
            data += part
            if data[:1] == EVALUATES:
                data, alone = data.lstrip(EVALUATES), True
        status, value, length = ANSWER.unpack_from(data)
        text = data[ANSWER.size :].decode(errors="replace")
        whole = len(data) == ANSWER.size + length
        if not whole or status != VALUE or not math.isfinite(value):
            return packed(FAILED, 0.0, text), False
        return packed(VALUE, value, ""), not alone and self.left > 0

    def quiet(self) -> bool:
        """Returns whether it has said nothing since it was asked last."""
        return not select.select([self.reading], [], [], 0)[0]

    def end(self) -> None:
        """Kills it."""
        os.kill(self.pid, walls.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.asking)
        os.close(self.reading)


def receive(connection: int) -> bytes:
    """Eight bytes of length and as many as they say; ends the program with the other side."""
    parts: list[bytes] = []
    missing, header = 8, True
    while missing:
        part = os.read(connection, min(missing, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        missing -= len(part)
        if header and not missing:
            missing, header = int.from_bytes(b"".join(parts), "little"), False
            parts = []
    return b"".join(parts)


def send(connection: int, status: bytes, value: float, text: str) -> None:
    """Writes an answer."""
    os.write(connection, packed(status, value, text))


def packed(status: bytes, value: float, text: str) -> bytes:
    """Returns an answer."""
    data = text[:TEXT_BYTES].encode(errors="replace")[:TEXT_BYTES]
    return ANSWER.pack(status, value, len(data)) + data


def address_space() -> int:
    """Returns the bytes of address space that this process has by now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
