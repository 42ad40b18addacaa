"""The program that runs a model's code: it isolates itself, then runs the code.

It is started as a script for each run; `code_run` is the other side. A marshalled request on stdin asks for a run; the
end of stdin asks it to end. The code's output goes to stdout; stderr has a line with its exit code, or the reason for
none, and after it the files that are kept.

With namespaces there are three processes. The guard (this one) waits for the end of stdin and watches the memory of the
run. Init is process 1 of a new process namespace; its end ends everything in it. The third process runs the code.
Without namespaces the guard takes init's part: it adopts orphans and kills them all.

Every import takes time in each run: those of `typing`, `json`, `ast` and `signal` took longer than the rest together.
"""

from __future__ import annotations

import _ast
import _signal  # type: ignore[import-not-found]
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

    from rollgrad.adapters.sandbox import kept_files, syscalls, walls
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import kept_files
    import syscalls
    import walls

    del sys.path[0]

PROCESSES = 64
"""Processes and threads of one run: room for a pool of threads, none for a fork bomb."""
FILES = 128
"""Open files of a process."""
RESERVE_MB = 32
"""Megabytes beyond the limit for the traceback of a MemoryError, whose frames still hold the memory."""
WATCH_SECONDS = 0.05
"""Seconds between checks of the memory of all processes together."""
INIT_MB = 32
"""Megabytes of all processes together beyond the limit of one: init, and what they share with the guard."""
SWEEP_SECONDS = 60.0
"""Longest time in which the guard kills remaining processes."""
SOURCE = "<code>"
"""File name of the model's code in tracebacks."""
OUT_OF_MEMORY = "memory"
"""Answer of the guard instead of an exit code: all processes together exceeded their memory."""
PR_SET_CHILD_SUBREAPER = 36


def main() -> NoReturn:
    """Serves one request."""
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # the code could send it to init, which would print a traceback
    request = read_request()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the new root has no /proc
    if request["namespaces"]:
        walls.enter_namespaces(request, writable=True)
        walls.close_memory()
        kept_files.unpack(request.pop("files"))
        reading, writing = os.pipe()
        answer(guard(walls.fork(lambda: init(request, reading, writing)), request, proc), request)
    else:
        os.umask(0o077)
        guard_without_namespaces(request, proc)
    os._exit(0)


def answer(code: int | str | None, request: dict[str, Any]) -> None:
    """Writes the exit code, and the files in the working directory if they are asked for. None of the code runs any
    more."""
    files = kept_files.pack(kept_files.KEPT_MB << 20) if request["keep"] else None
    rest = b"" if files is None else kept_files.KEPT + files
    os.close(1)  # the other side reads the output to its end before it reads an answer larger than a pipe
    whole = memoryview(b"%s\n%s" % (str(code).encode(), rest))
    while whole:
        whole = whole[os.write(2, whole) :]


def read_request() -> dict[str, Any]:
    """Reads eight bytes of length and a mapping; ends the program if stdin ends early."""
    data = bytearray()
    while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
        part = os.read(0, 1 << 16)
        if not part:
            os._exit(0)
        data += part
    request: dict[str, Any] = marshal.loads(memoryview(data)[8:])
    return request


def guard(child: int, request: dict[str, Any], proc: int) -> int | str | None:
    """Waits for `child`; returns its exit code, None if stdin ended first, or `OUT_OF_MEMORY` if it used too much
    memory. In the last two cases the child is killed."""
    exits = os.pidfd_open(child)
    bound = request["memory_mb"] + RESERVE_MB + INIT_MB << 20
    buffer = send_buffer(proc) if request["namespaces"] else 0  # without them the sockets are those of the machine
    stopped = None
    while True:
        ready, _, _ = select.select([0, exits], [], [], WATCH_SECONDS)
        if not ready and not exceeds(bound - buffer * sockets(proc), proc):
            continue
        if exits not in ready:
            stopped = None if ready else OUT_OF_MEMORY
            os.kill(child, walls.SIGKILL)
        _, status = os.waitpid(child, 0)
        return walls.exit_code(status) if exits in ready else stopped


def exceeds(bound: int, proc: int) -> bool:
    """Returns whether this process' descendants have more than `bound` bytes of memory together.

    Memory that processes share is divided among them if that can be read. The kernel takes longer for it, so it is read
    only if the plain sum is too much.
    """
    pids = list(descendants(os.getpid(), proc))
    return sum(resident(pid, proc) for pid in pids) > bound < sum(proportional(pid, proc) for pid in pids)


def sockets(proc: int) -> int:
    """Returns the number of sockets in this process' network, those that no process has open any more but that hold
    data among them."""
    first = read_file("self/net/sockstat", proc).split()[:3]
    return int(first[2]) if first[:2] == [b"sockets:", b"used"] else 0


def send_buffer(proc: int) -> int:
    """Returns the bytes of memory that a socket may hold, which no process is charged for; `syscalls.forbid` keeps code
    from asking for more."""
    return int(read_file("sys/net/core/wmem_default", proc) or 0)


def resident(pid: int, proc: int) -> int:
    """Returns the bytes of memory of a process, including shared memory; 0 if it has ended."""
    fields = read_file(f"{pid}/statm", proc).split()
    return int(fields[1]) * resource.getpagesize() if fields else 0


def proportional(pid: int, proc: int) -> int:
    """Returns the bytes of memory of a process, with its part of shared memory, or with all of it if that part cannot
    be read."""
    for line in read_file(f"{pid}/smaps_rollup", proc).splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return resident(pid, proc)


def descendants(parent: int, proc: int) -> Iterator[int]:
    """Yields the descendants of `parent` whose parents have not ended."""
    try:
        threads = os.open(f"{parent}/task", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:  # it ended meanwhile
        return
    try:
        names = os.listdir(threads)
    except OSError:
        return
    finally:
        os.close(threads)
    for thread in names:
        for child in read_file(f"{parent}/task/{thread}/children", proc).split():
            yield int(child)
            yield from descendants(int(child), proc)


def read_file(path: str, proc: int) -> bytes:
    """Returns the content of a file below /proc; empty if its process has ended, or it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.read(file, 1 << 16)
        finally:
            os.close(file)
    except OSError:
        return b""


def init(request: dict[str, Any], reading: int, writing: int) -> int:
    """Runs as process 1: it waits for the code, and its end, or that of the guard, ends all processes."""
    walls.end_with_parent()
    os.close(writing)
    if select.select([reading], [], [], 0)[0]:  # only the guard has the other end, so the guard has ended
        return 1
    code = walls.fork(lambda: run(request, PROCESSES))
    while True:
        pid, status = os.wait()
        if pid == code:
            return walls.exit_code(status)


def guard_without_namespaces(request: dict[str, Any], proc: int) -> None:
    """Runs the code in a temporary directory, kills all its descendants and answers."""
    import tempfile

    walls.call(walls.libc.prctl, PR_SET_CHILD_SUBREAPER, 1)
    directory = tempfile.mkdtemp(prefix="rollgrad-python-", dir=request["directory"])
    uid = os.getuid() or walls.NOBODY
    if os.getuid() == 0:
        os.chown(directory, walls.NOBODY, walls.NOBODY)
    os.chdir(directory)
    limit = PROCESSES + threads_of(uid)  # the kernel counts all processes of the user
    me = os.getpid()
    try:
        files = request.pop("files")
        as_user_of_code(lambda: kept_files.unpack(files))
        code = guard(walls.fork(lambda: drop_and_run(request, limit)), request, proc)
        sweep(proc)
        as_user_of_code(lambda: answer(code, request))
    finally:
        if os.getpid() == me:  # the process of the code, which is forked here, leaves this way, too
            sweep(proc)
            os.chdir("/")
            os.spawnv(os.P_WAIT, "/bin/rm", ["rm", "-rf", directory])  # shutil's cannot remove what lies very deep


def as_user_of_code(body: Callable[[], None]) -> None:
    """Calls `body` with the rights of the code's user: root could be led elsewhere by links that the code makes."""
    if os.getuid() != 0:
        return body()
    os.setgroups([])
    os.setegid(walls.NOBODY)
    os.seteuid(walls.NOBODY)
    try:
        return body()
    finally:
        os.seteuid(0)
        os.setegid(0)


def drop_and_run(request: dict[str, Any], processes: int) -> int:
    """Runs the code, as nobody if this is root."""
    if os.getuid() == 0:
        walls.become_nobody()
    return run(request, processes)


def run(request: dict[str, Any], processes: int) -> int:
    """Gives up every privilege and runs the code; returns its exit code, or raises SystemExit."""
    os.setsid()  # signals to its own group must not reach the guard
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    os.close(3)
    walls.limit(
        {
            resource.RLIMIT_AS: request["memory_mb"] + RESERVE_MB << 20,
            resource.RLIMIT_CPU: request["cpu_seconds"],
            resource.RLIMIT_NPROC: processes,
            resource.RLIMIT_FSIZE: walls.DISK_MB << 20,
            resource.RLIMIT_NOFILE: FILES,
            resource.RLIMIT_CORE: 0,
        }
    )
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (min(request["memory_mb"] << 20, hard), hard))
    walls.give_up_privileges()
    walls.open_memory()
    syscalls.forbid(judged=False)
    os.dup2(1, 2)
    os.environ["HOME"] = os.environ["TMPDIR"] = os.getcwd()
    return execute(request["code"], request["memory_mb"])


def execute(code: str, memory_mb: int) -> int:
    """Runs the code as a REPL would: the value of a last expression is printed."""
    import site

    site.setquit()
    sys.path.insert(0, "")
    sys.argv = [""]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main_module = sys.modules["__main__"] = type(sys)("__main__")
    try:
        tree: Any = compile(code, SOURCE, "exec", _ast.PyCF_ONLY_AST)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, SOURCE, "exec"), vars(main_module))
        if last is not None:
            sys.displayhook(eval(compile(_ast.Expression(last.value), SOURCE, "eval"), vars(main_module)))
        return 0
    except SystemExit:
        raise
    except BaseException as error:  # the model's code may raise anything, and reads the traceback
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        tell(error, code)
        if isinstance(error, MemoryError):
            print(f"The code may use {memory_mb} MB of memory.", file=sys.stderr)  # noqa: T201
        return 1


def tell(error: BaseException, code: str) -> None:
    """Prints a traceback with only the frames of the model's code, and their source lines."""
    import linecache
    import traceback

    linecache.cache[SOURCE] = (len(code), None, code.splitlines(keepends=True), SOURCE)
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != SOURCE:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def sweep(proc: int) -> None:
    """Kills all descendants. A killed process cannot fork any more, and its orphans become ours, so this ends."""
    deadline = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid(), proc):
            try:
                os.kill(pid, walls.SIGKILL)
            except OSError:  # it ended meanwhile
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def threads_of(uid: int) -> int:
    """Returns the number of threads that the user runs now."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


if __name__ == "__main__":
    main()
