"""Stands for a Python program that runs elsewhere (`tests/script_host.py`): it has its streams, gets its signals, and
ends as it does. Its words are the path of the host's socket, and those after `python`. The variable `SCRIPT_FILES` has
the numbers of further files that the program gets.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that the program gets."""


def main(path: str, *words: str) -> None:
    answer = b""
    files = [0, 1, 2, *map(int, os.environ.pop("SCRIPT_FILES", "").split())]
    with suppress(OSError), socket.socket(socket.AF_UNIX) as host:
        host.connect(path)
        # One that comes before the program is asked for, or before it is passed on, waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        socket.send_fds(host, [b"."], files)
        host.sendall(json.dumps([words, os.getcwd(), dict(os.environ), files]).encode() + b"\n")
        for number in SIGNALS:
            signal.signal(number, lambda number, _: host.sendall(bytes([number])))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        answer = host.recv(16)
    if not answer:
        sys.exit(f"The process that runs programs died at {' '.join(words)}")
    status = int(answer)
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
