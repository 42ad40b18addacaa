"""`GlobalRandomness` gives each game its own stream of the process-wide generators of `random` and NumPy.

Some libraries seed and draw from the global generators, so that episodes at the same time would disturb each other.
Here one game at a time, in the whole process, runs with its own state installed; then the state before is restored.
Limit: a thread that draws from the global generators meanwhile, without this lock, draws from the game's stream.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()


class GlobalRandomness:
    """A random stream that starts at `seed` (at least 0 and below 2**32) and continues with each use."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[Any, Any] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Runs the block with this stream as the global one; waits for other games."""
        import numpy as np

        with _lock:
            outside = random.getstate(), np.random.get_state()
            if self._state is None:
                random.seed(self._seed)
                np.random.seed(self._seed)
            else:
                random.setstate(self._state[0])
                np.random.set_state(self._state[1])
            try:
                yield
            finally:
                self._state = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])
