"""Twenty clients of `server_load.py`, in a process that imports little: it should cost the server, not the machine.

Args: the server's port. Lines on the standard input start ("on") and stop ("off") them; its end ends the process.
"""

import socket
import sys
import threading
import time
from contextlib import suppress

CLIENTS = 20
PAUSE = 0.05
"""Seconds between two attempts of a client: it harms by what it sends, not by the processor that it takes itself."""
BODY = b'{"messages": [{"role": "user", "content": "' + b"<|im_end|>" * 1_200_000 + b'"}]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"

active = threading.Event()


def harm(port: int, number: int) -> None:
    """Sends one of three kinds of harm while `active` is set, for ever."""
    while True:
        active.wait()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            if number % 3 == 0:
                connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
                connection.recv(1000)
            elif number % 3 == 1:
                connection.sendall(HEAD)
                while active.is_set():
                    connection.sendall(b"X-Header: value\r\n" * 100)
                    time.sleep(PAUSE)
            else:
                connection.sendall(HEAD + b"Content-Length: 100000\r\n\r\n" + BODY[:50_000])
                connection.settimeout(1)
                connection.recv(1000)
        time.sleep(PAUSE)


if __name__ == "__main__":
    for each in range(CLIENTS):
        threading.Thread(target=harm, args=(int(sys.argv[1]), each), daemon=True).start()
    for line in sys.stdin:
        active.set() if line.strip() == "on" else active.clear()
