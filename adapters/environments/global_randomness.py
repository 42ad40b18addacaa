"""`GlobalRandomness` gives each game its own stream of the process-wide generators of `random` and NumPy.

Some libraries seed and draw from the global generators, so that episodes at the same time would disturb each other.
Here one game at a time, in the whole process, runs with its own state installed; then the state before is restored.
A game that hangs holds up others no longer than its own deadline. Limits: a thread that draws from the global
generators meanwhile, without this, draws from the game's stream; so does a game whose deadline is over.
"""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attrs import frozen

State = tuple[Any, Any]


@frozen(eq=False)
class _Turn:
    """The time of one game: until when it may last at most, and the state that is restored after it."""

    until: float
    outside: State


class _Turns:
    """Knows whose turn it is, in this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now: _Turn | None = None

    def begin(self, seconds: float, state: State) -> _Turn:
        """Waits for the turn before, at most until its end; installs `state`."""
        with self._changed:
            while self._now is not None and (left := self._now.until - time.monotonic()) > 0:
                self._changed.wait(left)
            outside = current() if self._now is None else self._now.outside
            self._now = _Turn(time.monotonic() + seconds, outside)
            install(state)
            return self._now

    def end(self, turn: _Turn) -> State | None:
        """Restores the state before `turn`, and returns the one at its end; None if another turn has begun."""
        with self._changed:
            if self._now is not turn:
                return None
            state, self._now = current(), None
            install(turn.outside)
            self._changed.notify()
            return state


_turns = _Turns()


class GlobalRandomness:
    """A random stream that starts at `seed` (at least 0 and below 2**32) and continues with each use, of which one
    takes `seconds` at most."""

    def __init__(self, seed: int, seconds: float = 60.0) -> None:
        import numpy as np

        self._state: State = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        self._seconds = seconds

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Runs the block with this stream as the global one; waits for other games."""
        turn = _turns.begin(self._seconds, self._state)
        try:
            yield
        finally:
            self._state = _turns.end(turn) or self._state


def current() -> State:
    """Returns the state of the global generators."""
    import numpy as np

    return random.getstate(), np.random.get_state()


def install(state: State) -> None:
    """Sets the state of the global generators."""
    import numpy as np

    random.setstate(state[0])
    np.random.set_state(state[1])
