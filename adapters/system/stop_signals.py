"""Ends a coroutine on a signal, also while users' code blocks the event loop.

Ctrl-C, SIGTERM, which schedulers send before they kill (Slurm and Kubernetes 30 s before), SIGUSR1 and SIGUSR2, by
which they tell of it earlier (`sbatch --signal`), and SIGHUP of a closed terminal cancel the coroutine. Handlers of an
event loop run when it is free, and Python's own when the main thread returns to Python, which a sleeping one may never
do, as systems may hand the signal to another thread. So a thread learns of it by the file descriptor of
`signal.set_wakeup_fd`, says what is waited for, and after `BLOCKED_SECONDS` breaks users' code that blocks the loop
off, so that there is time left to save.

Does not own: what is saved, and users' code in C that does not return to Python, which nothing can break off.
"""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Container, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

import structlog

from rollgrad.adapters.system.blocked_loop import frames_in_loop, frames_of, reporting_blocks
from rollgrad.application.foreign import users_place
from rollgrad.application.interruption import Interrupted, urgent

SAY_SECONDS = 1.0
"""Time in which the event loop has to answer after a signal, before it is said what blocks it."""
ASK_SECONDS = 0.2
"""Time between two questions whether it is free."""
BLOCKED_SECONDS = 5.0
"""Time after which users' code that blocks it is broken off, and again after as long."""

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run, whose sender may kill it soon after."""
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end it, too, unless the program has a handler of its own for them: by default they kill."""

heeding = threading.Event()
"""Whether a run of this process heeds signals now."""

log = structlog.get_logger(__name__)
Result = TypeVar("Result")

RUN_ENDS = "the run ends, and saves its last finished step"
"""Effect of a signal on a training."""


async def heeding_signals(work: Coroutine[Any, Any, Result], says: str = RUN_ENDS) -> tuple[Result, int]:
    """Returns the result of `work`, and the signal that cancelled it (SIGINT if none did), which is logged with what it
    `says`. A second one but SIGINT does nothing, so that it cannot interrupt saving; ignored signals (nohup) stay
    so.

    Raises:
        KeyboardInterrupt: SIGINT, by which `work` was cancelled, or a second one.
    """
    task = asyncio.current_task()
    assert task is not None
    loop, blocked = asyncio.get_running_loop(), "run, unless Ctrl-C or SIGTERM break it off and save"
    with reporting_blocks(blocked), _heeding(loop, task.cancel, says) as received:
        try:
            result = await work
        except asyncio.CancelledError as error:
            if received and received[0] == signal.SIGINT:
                raise KeyboardInterrupt from error
            raise
    return result, received[0] if received else signal.SIGINT


@contextmanager
def deaf() -> Iterator[None]:
    """Lets signals that end a run, but for Ctrl-C, do nothing inside the block, which reports what one has ended: a
    terminal or a scheduler sends several."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = {number: handler for number, handler in _heeded().items() if number != signal.SIGINT}
    for number in before:
        signal.signal(number, lambda number, frame: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heeded() -> dict[int, Any]:
    """Returns the signals that a run heeds, with their handlers now: none that is ignored (nohup), nor a warning for
    which the program has a handler of its own."""
    before = {number: signal.getsignal(number) for number in (*STOPS, *WARNINGS)}
    return {
        number: handler
        for number, handler in before.items()
        if (handler is signal.SIG_DFL if number in WARNINGS else handler is not signal.SIG_IGN)
    }


@contextmanager
def _heeding(loop: asyncio.AbstractEventLoop, cancel: Callable[[], object], says: str) -> Iterator[list[int]]:
    """Calls `cancel` at the first signal inside the block, and yields a list that then has it."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield []
        return
    heeded = _heeded()
    listener = _Listener(loop, cancel, says, heeded)
    descriptor = signal.set_wakeup_fd(listener.told.fileno(), warn_on_full_buffer=False)
    for number in heeded:
        signal.signal(number, listener.handle)
    threading.Thread(target=listener.listen, name="stop-signals", daemon=True).start()
    urgent.clear()
    heeding.set()
    try:
        yield listener.received
    finally:
        heeding.clear()
        listener.send_no_more()
        urgent.clear()
        for number, handler in heeded.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)
        listener.close()


class _Listener:
    """Handles signals in the main thread, which made it, and listens to them in a thread of its own.

    Args:
        loop: the event loop of the main thread.
        cancel: ends the work in it.
        says: effect of a signal, for the log.
        heeded: the signals that cancel.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, cancel: Callable[[], object], says: str, heeded: Container[int]
    ) -> None:
        self._loop, self._cancel, self._says, self._heeded = loop, cancel, says, heeded
        self.received: list[int] = []
        """The signal that cancelled, if one did."""
        self._hears, self.told = socket.socketpair()
        self.told.setblocking(False)
        self._main = threading.get_ident()
        self._over, self._breaks_off, self._sending = threading.Event(), threading.Event(), threading.Lock()
        self._ctrl_c = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Implements a handler of `signal.signal`; it raises where a signal breaks off what the main thread does."""
        with suppress(OSError):  # full: it has been told
            self.told.send(bytes([number]))  # again, should someone have set another file descriptor
        self._ctrl_c += number == signal.SIGINT
        self._hurry(number)
        if self._breaks_off.is_set():
            self._breaks_off.clear()
            if users_place(frames_in_loop(frame), innermost=True):
                raise Interrupted
        elif self._ctrl_c > 1:
            raise KeyboardInterrupt

    def listen(self) -> None:
        """Cancels at the first signal, until `close`."""
        while not self._over.is_set():
            heard = self._hears.recv(1)
            if not heard:  # users' code has closed what is not its own
                break
            number = heard[0]
            self._hurry(number)
            if number in self._heeded and not self.received:
                self.received.append(number)
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._cancel)
                    log.info(f"{signal.Signals(number).name}: {self._says}")
                    self._watch(number)
        self._hears.close()

    def send_no_more(self) -> None:
        """Ends the sending of signals, whose handler will be another one."""
        with self._sending:
            self._over.set()

    def close(self) -> None:
        """Ends the thread."""
        with suppress(OSError):
            self.told.send(b"\0")
        self.told.close()

    def _hurry(self, number: int) -> None:
        if number in STOPS and not self._over.is_set():
            urgent.set()

    def _watch(self, number: int) -> None:
        """Says what a signal that has come waits for; breaks off users' code that blocks the loop."""
        name = signal.Signals(number).name
        while not self._over.wait(ASK_SECONDS):
            free = threading.Event()
            self._loop.call_soon_threadsafe(free.set)
            blocked, said = SAY_SECONDS, False
            while not free.wait(blocked) and not self._over.is_set():
                place = users_place(frames_of(self._main), innermost=True)
                if place and said:
                    log.warning(f"{name}: breaking off the function that blocks the run", where=place)
                    self._break_off(number)
                elif place:
                    log.warning(
                        f"{name}: waiting {BLOCKED_SECONDS:g} s for a function that blocks the run, then breaking it "
                        "off",
                        where=place,
                    )
                blocked, said = BLOCKED_SECONDS, bool(place)

    def _break_off(self, number: int) -> None:
        with self._sending:
            if not self._over.is_set():  # else the handler is another one
                self._breaks_off.set()
                signal.pthread_kill(self._main, number)
