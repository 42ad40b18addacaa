"""The program that runs a model's code: it shuts itself in, then runs it.

Started as a script, for each run anew; `sandbox` is the other side. A marshalled request on stdin asks for a run; the
end of stdin asks for its end. The code's output goes to stdout; stderr carries its exit code, or why there is none.

Three processes with namespaces: the guard (this one) waits for the end of stdin; init is process 1 of a new process
namespace, whose end is the end of everything in it; the third runs the code. Without namespaces the guard takes init's
part: it adopts orphans and kills them all.

Every import costs each run its time: those of `typing`, `json`, `ast` and `signal` took longer than the rest together.
"""

from __future__ import annotations

import _ast
import ctypes
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

NOBODY = 65534
"""User and group that root's runs become."""
PROCESSES = 64
"""Processes and threads of one run: room for a pool of threads, none for a fork bomb."""
FILES = 128
"""Open files of a process."""
DISK_MB = 64
"""Megabytes that a file, and with namespaces all files of a run together, may take."""
RESERVE_MB = 32
"""Megabytes beyond the limit for the traceback of a MemoryError, whose frames still hold what used it up."""
SWEEP_SECONDS = 60.0
"""Longest that the guard hunts what is left over."""
SOURCE = "<code>"
"""What tracebacks call the model's code."""

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
SIGKILL = 9
SYS_MOUNT_SETATTR = 442  # the same on every architecture
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Serves one request."""
    request = read_request()
    if request["namespaces"]:
        enter_namespaces(request)
        reading, writing = os.pipe()
        code = guard(fork(lambda: init(request, reading, writing)))
    else:
        os.umask(0o077)
        code = guard_without_namespaces(request)
    os.write(2, str(code).encode())
    os._exit(0)


def read_request() -> dict[str, Any]:
    """Eight bytes of length and a mapping; ends the program when stdin ends early."""
    data = b""
    while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
        part = os.read(0, 1 << 16)
        if not part:
            os._exit(0)
        data += part
    request: dict[str, Any] = marshal.loads(data[8:])
    return request


def guard(child: int) -> int | None:
    """The exit code of `child`, or None when stdin ended first (it is killed then)."""
    exits = os.pidfd_open(child)
    ready, _, _ = select.select([0, exits], [], [])
    if exits not in ready:
        os.kill(child, SIGKILL)
    _, status = os.waitpid(child, 0)
    return exit_code(status) if exits in ready else None


def init(request: dict[str, Any], reading: int, writing: int) -> int:
    """Process 1: outlives the code, and takes everything with it when it, or the guard, ends."""
    call(libc.prctl, PR_SET_PDEATHSIG, SIGKILL)
    os.close(writing)
    if select.select([reading], [], [], 0)[0]:  # only the guard holds the other end: it ended before the prctl
        return 1
    code = fork(lambda: run(request, PROCESSES))
    while True:
        pid, status = os.wait()
        if pid == code:
            return exit_code(status)


def guard_without_namespaces(request: dict[str, Any]) -> int | None:
    """Runs the code in a temporary directory; afterwards kills every process that came of it."""
    import shutil
    import tempfile

    call(libc.prctl, PR_SET_CHILD_SUBREAPER, 1)
    directory = tempfile.mkdtemp(prefix="rollgrad-python-", dir=request["directory"])
    uid = os.getuid() or NOBODY
    if os.getuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
    os.chdir(directory)
    limit = PROCESSES + threads_of(uid)  # the kernel counts all processes of the user

    def drop_and_run() -> int:
        if os.getuid() == 0:
            become_nobody()
        return run(request, limit)

    child = fork(drop_and_run)
    try:
        return guard(child)
    finally:
        sweep()
        os.chdir("/")
        shutil.rmtree(directory, ignore_errors=True)


def run(request: dict[str, Any], processes: int) -> int:
    """Gives up every privilege and runs the code; returns, or raises SystemExit, as a Python program ends."""
    os.setsid()  # its signals to its own group stay in it
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    os.close(3)
    for limit, value in (
        (resource.RLIMIT_AS, request["memory_mb"] + RESERVE_MB << 20),
        (resource.RLIMIT_CPU, request["cpu_seconds"]),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, DISK_MB << 20),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (min(request["memory_mb"] << 20, hard), hard))
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    call(libc.capset, header, (ctypes.c_uint32 * 6)())
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
    """Prints a traceback of the model's frames only, with their lines."""
    import linecache
    import traceback

    linecache.cache[SOURCE] = (len(code), None, code.splitlines(keepends=True), SOURCE)
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != SOURCE:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def enter_namespaces(request: dict[str, Any]) -> None:
    """New namespaces of everything, and a file system with the interpreter, the system's libraries and little else."""
    others = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:  # mounts with root's rights, since nobody may not read an interpreter in root's home
        call(libc.unshare, CLONE_NEWNS)
        change_root(request)
        become_nobody()
        # A user namespace of its own, for then the kernel counts the processes of this run alone.
        call(libc.unshare, CLONE_NEWUSER | others)
        return
    call(libc.unshare, CLONE_NEWUSER | CLONE_NEWNS | others)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    change_root(request)


def change_root(request: dict[str, Any]) -> None:
    """Makes a small tmpfs the root: read-only views of `visible` without `hidden`, devices, and an empty /tmp."""
    mount(None, "/", MS_REC | MS_PRIVATE)
    size = f"size={DISK_MB}m,nr_inodes=16k,mode=755"
    mount("tmpfs", "/tmp", MS_NOSUID | MS_NODEV, size)
    os.mkdir("/tmp/old")
    call(libc.pivot_root, b"/tmp", b"/tmp/old")
    os.chdir("/")
    for path in (*request["visible"], "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"):
        source = "/old" + path
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.islink(source):
            os.symlink(os.readlink(source), path)
        elif os.path.exists(source):
            if os.path.isdir(source):
                os.makedirs(path, exist_ok=True)
            else:
                os.close(os.open(path, os.O_CREAT))
            mount(source, path, MS_BIND | MS_REC)
            if not path.startswith("/dev/"):
                make_read_only(path)
    for path in request["hidden"]:
        if os.path.isdir(path):
            mount("tmpfs", path, MS_NOSUID | MS_NODEV | MS_RDONLY, "size=4k,mode=755")
    for path in ("/tmp", "/dev/shm"):
        os.mkdir(path)
        os.chmod(path, 0o1777)
    call(libc.umount2, b"/old", MNT_DETACH)
    os.rmdir("/old")
    os.chdir("/tmp")


def become_nobody() -> None:
    """Gives up root."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def mount(source: str | None, target: str, flags: int, options: str | None = None) -> None:
    """mount(2); a source "tmpfs" is a tmpfs."""
    kind = source.encode() if source == "tmpfs" else None
    data = options.encode() if options else None
    call(libc.mount, source.encode() if source else None, target.encode(), kind, ctypes.c_ulong(flags), data)


def make_read_only(path: str) -> None:
    """Takes writing, set-uid and devices from what is mounted at and under `path`."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    call(libc.syscall, SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, ctypes.c_size_t(32))


def call(function: Any, *arguments: Any) -> None:
    """A C function that returns 0, or sets errno."""
    if function(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function.__name__}: {os.strerror(error)}")


def fork(body: Callable[[], int]) -> int:
    """A child that ends with what `body` returns."""
    child = os.fork()
    if child == 0:
        sys.exit(body())
    return child


def exit_code(status: int) -> int:
    """128 and the signal, as shells have it, for a process that was killed."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def sweep() -> None:
    """Kills all descendants. One that is killed cannot fork any more, and its orphans become ours: that converges."""
    deadline = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < deadline:
        kill_children(os.getpid())
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def kill_children(parent: int) -> None:
    """Kills what descends from `parent`, as far as it is still linked."""
    try:
        for thread in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{thread}/children") as file:
                children = [int(pid) for pid in file.read().split()]
            for child in children:
                os.kill(child, SIGKILL)
                kill_children(child)
    except OSError:  # it ended meanwhile: the next round finds what it left
        return


def threads_of(uid: int) -> int:
    """Threads that the user runs now."""
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
