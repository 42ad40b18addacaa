"""The program that judges replies: it imports a judge, isolates itself, and forks judging processes.

`judge_pool` starts it as a script and talks to it over a socket, its stdin. A marshalled mapping names the judge; each
pickled request after that is answered before the next comes. A judging process cannot start others; it can read the
files of the interpreter and of installed packages, and change none. After evaluating more than arithmetic of a reply, a
timeout or a failure it judges no other reply, so that code from a reply cannot affect others. Its answer is passed on
as bytes and never parsed here. Libraries that evaluate replies get the `eval` of `expressions`.

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
"""Whether this is Linux; elsewhere judges run without isolation, if that is allowed."""
FILES = 64
"""Open files of a judgement."""
PREPARED = 64
"""Number of preparations that are kept; further ones are made again in each process."""
JUDGEMENTS = 500
"""Judgements of one process, so that caches of libraries do not grow up to the memory limit."""
EVALUATES = b"!"
"""Byte that a process writes before it evaluates an expression of a reply."""


def main() -> NoReturn:
    """Starts a judge and serves requests until the other side closes."""
    connection = os.dup(0)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1):  # libraries that print must not write into the answers
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
        pid = os.fork()  # libraries start threads, and only a process without threads can enter namespaces
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
    except BaseException as error:  # of any kind: the other side gets the reason why the judge did not start
        send(connection, FAILED, 0.0, repr(error))
    os._exit(1)


def serve(judge: Any, connection: int, null: int, request: dict[str, Any], space: int) -> NoReturn:
    """Isolates this process, and answers requests, one at a time; `space` is its address space in bytes."""
    if request["walls"] == "namespaces":
        walls.end_with_parent()
    if request["walls"]:
        walls.give_up_privileges()
        walls.close_memory()
    if request["walls"] == "landlock":
        walls.read_only_files([*request["visible"], *walls.DEVICES])
    prepared: set[Any] = set()
    judging: Judging | None = None
    again = False
    gc.collect()
    gc.freeze()  # otherwise garbage collection in each process would copy every page with an object
    send(connection, READY, 0.0, "")
    while True:
        question = receive(connection)
        common = pickle.loads(question)[1]
        if common and common not in prepared and len(prepared) < PREPARED:
            prepared.add(common)
            with contextlib.suppress(Exception):  # the judgement itself will fail with the same error, and report it
                judge.prepare(*common)
            gc.freeze()
            again = False
        if judging is not None and not (again and judging.quiet()):
            judging.end()
            judging = None
        judging = judging or fork(judge, connection, null, request, space)
        answer, again = judging.ask(question, request["seconds"], connection)
        os.write(connection, answer)


def fork(judge: Any, connection: int, null: int, request: dict[str, Any], space: int) -> Judging:
    """Starts a judging process; arguments as for `serve`."""
    asked, asking = os.pipe()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(null, 2)
        for descriptor in (connection, null, asking, reading):
            os.close(descriptor)
        if LINUX:
            walls.end_with_parent()
        walls.limit(
            {
                **({resource.RLIMIT_AS: space + (request["memory_mb"] << 20)} if LINUX else {}),
                resource.RLIMIT_FSIZE: 0,
                resource.RLIMIT_NOFILE: FILES,
                resource.RLIMIT_CORE: 0,
            }
        )
        if request["walls"]:
            syscalls.forbid(judged=True)
        work(judge, asked, writing)
    os.close(asked)
    os.close(writing)
    return Judging(pid, asking, reading)


def work(judge: Any, asked: int, writing: int) -> NoReturn:
    """Judges in a process of its own until there are no more requests."""
    expressions.announce.append(lambda: os.write(writing, EVALUATES))
    while True:
        name, common, arguments = pickle.loads(receive(asked))
        try:
            status, value, text = VALUE, float(getattr(judge, name)(*common, *arguments)), ""
        except BaseException as error:  # the reply may have made it raise anything
            status, value, text = FAILED, 0.0, repr(error)
        send(writing, status, value, text)


class Judging:
    """A judging process, for the process that forked it."""

    def __init__(self, pid: int, asking: int, reading: int) -> None:
        self.pid = pid
        self.asking = asking
        self.reading = reading
        self.left = JUDGEMENTS
        os.set_blocking(asking, False)

    def ask(self, question: bytes, seconds: float, connection: int) -> tuple[bytes, bool]:
        """Returns the answer, and whether the process may judge again. This program ends if the other side has."""
        self.left -= 1
        deadline = time.monotonic() + seconds
        question = len(question).to_bytes(8, "little") + question
        data, alone = b"", False
        while len(data) < ANSWER.size or len(data) < ANSWER.size + ANSWER.unpack_from(data)[2]:
            room = [self.asking] if question else []
            wait = max(0.0, deadline - time.monotonic())
            ready, free, _ = select.select([self.reading, connection], room, [], wait)
            if connection in ready:  # no request comes before an answer, so the other side has ended
                os._exit(0)
            if not ready and not free:
                return ANSWER.pack(TIMED_OUT, 0.0, 0), False
            with contextlib.suppress(BrokenPipeError):  # it has ended, which reading will show
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
        """Returns whether the process has written nothing since its last answer."""
        return not select.select([self.reading], [], [], 0)[0]

    def end(self) -> None:
        """Kills the process."""
        os.kill(self.pid, walls.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.asking)
        os.close(self.reading)


def receive(connection: int) -> bytes:
    """Reads eight bytes of length and that many bytes; ends the program if the other side has ended."""
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
    """Returns an answer as bytes."""
    data = text[:TEXT_BYTES].encode(errors="replace")[:TEXT_BYTES]
    return ANSWER.pack(status, value, len(data)) + data


def address_space() -> int:
    """Returns the bytes of address space that this process uses now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
