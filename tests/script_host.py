"""Runs Python programs, each in a fork of this process, which has imported what most of them need: imports take longer
than the smallest work of most.

Its words are the descriptor of a socket that listens, and modules to import. A client (`tests/script_client.py`) passes
its files, a line of JSON (words as after `python`, folder, environment, numbers of the files), and then a byte for each
signal; it gets the exit status, or nothing if this process has died. SIGINT is for all processes of the program's
group, as from a terminal. A program can import what its own PYTHONPATH has, too, but for the repository. It ends with
its client, and this process with its standard input. Nothing has computed before a fork, so that no thread is lost in
it.

With `forked_spawns` among the modules, what a program spawns by `multiprocessing` is a fork, too.
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
from contextlib import suppress
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
MOST_FILES = 16
ABOVE = 512
"""Least number of a file that is moved out of the way of others."""

HEEDS_FORKS = "jemalloc_bg_thd"
"""A thread of pyarrow's memory, which begins again in a fork."""


def run(words: list[str]) -> int:
    """Runs `-m` and a module, `-c` and a program, or a script, with its arguments; returns the exit status."""
    kind, rest = words[0], words[1:]
    try:
        if kind == "-m":
            sys.argv = rest
            sys.path.insert(0, os.getcwd())
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            script = types.ModuleType("__main__")
            # Processes that the script spawns name its classes by the second name.
            sys.modules["__main__"] = sys.modules["__mp_main__"] = script
            if kind == "-c":
                sys.argv = ["-c", *rest[1:]]
                sys.path.insert(0, os.getcwd())
                code = compile(rest[0], "<string>", "exec")
            else:
                sys.argv = words
                sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
                script.__file__ = kind
                code = compile(Path(kind).read_bytes(), kind, "exec")
            exec(code, script.__dict__)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # as Python itself ends
        traceback.print_exc()
        return 1
    return 0


def place(files: list[int], numbers: list[int]) -> None:
    """Gives open files these numbers."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def program(request: bytes, files: list[int]) -> None:
    """Becomes the program that was asked for, in a session of its own, which heeds the signals of a terminal."""
    status = 1
    try:
        os.setsid()
        words, folder, environment, numbers = json.loads(request)
        place(files, numbers)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        own = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in own if path not in ("", ROOT, *sys.path)]
        # Both are for what the program starts, not for what that starts.
        sys.executable, workers = os.environ.pop("SCRIPT_PYTHON", sys.executable), os.environ.pop("SCRIPT_RAY", "")
        if "forked_spawns" in sys.modules:
            sys.modules["forked_spawns"].fork_spawned()
        if workers:
            importlib.import_module("forked_ray").fork_workers(workers)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        status = run(words)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def attend(client: socket.socket) -> None:
    """Starts the program of a client, passes signals on, and answers with the exit status."""
    _, files, _, _ = socket.recv_fds(client, 1, MOST_FILES)
    request = client.makefile("rb", buffering=0).readline()
    child = os.fork()
    if child == 0:
        client.close()
        program(request, files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(child)
    while ended not in select.select([client, ended], [], [])[0]:
        number = client.recv(1)
        if not number:
            with suppress(ProcessLookupError):  # it has no session yet
                os.killpg(child, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
            return
        try:
            (os.killpg if number[0] == signal.SIGINT else os.kill)(child, number[0])
        except ProcessLookupError:  # it has no session yet
            os.kill(child, number[0])
    _, status = os.waitpid(child, 0)
    client.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def main(descriptor: str, *modules: str) -> None:
    listener = socket.socket(fileno=int(descriptor))
    gc.disable()  # imports leave no garbage
    sys.modules["ray"] = None  # type: ignore[assignment]  # vLLM would, but it reads a worker's variables at import
    for module in modules:
        importlib.import_module(module)
    del sys.modules["ray"]
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    names = [name for name in names if name != HEEDS_FORKS]
    if len(names) > 1:
        sys.exit(f"Importing {' '.join(modules)} starts threads, which forks would lose: {names}")
    if "forked_spawns" in sys.modules:  # its processes are killed, and would leave folders of their own
        sys.modules["multiprocessing.process"].current_process()._config["tempdir"] = str(
            Path(listener.getsockname()).parent
        )
    gc.freeze()  # else each fork would look through the modules for it
    gc.enable()
    while listener in select.select([listener, 0], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            try:
                attend(client)
            finally:
                os._exit(0)
        client.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which Python has put there
    main(*sys.argv[1:])
