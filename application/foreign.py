"""The boundary around code that is not rollgrad's: users' files and functions, environments, tools, servers, libraries.

Invariant: an exception of such code reaches the run as one sentence, and never ends an event loop or thread that others
wait for. Does not own: deadlines, which belong to the caller.
"""

import sysconfig
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from rollgrad.domain.errors import ForeignError, RollgradError

LONGEST = 1000
"""Largest number of characters of a foreign error or value in a sentence."""


def error_text(error: BaseException) -> str:
    """Returns the kind and the words of an error on one line, whatever its `__str__` does."""
    try:
        words = " ".join(str(error).split())
    except BaseException as second:  # also of a user's own class
        words = f"(its message cannot be read: {type(second).__name__})"
    return _cut(f"{type(error).__name__}: {words}" if words else type(error).__name__)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's words; its `repr` where it has none.

    >>> first_line(ValueError("no number")), first_line(ValueError())
    ('no number', 'ValueError()')
    """
    return (str(error).strip() or repr(error)).splitlines()[0]


def lacks_memory(error: BaseException) -> bool:
    """Returns whether an error is a lack of memory, for which torch raises a plain RuntimeError on a CPU, and a process
    of a model is told by its words. Imports no torch.

    >>> lacks_memory(MemoryError()), lacks_memory(RuntimeError("no such row"))
    (True, False)
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    words = ("can't allocate memory", "OutOfMemoryError:")
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or any(each in str(error) for each in words)


def error_place(error: BaseException) -> str:
    """Returns where in a user's own file an error came from, as ` (reward.py, line 5)`; nothing where it came from
    libraries and rollgrad alone."""
    place = users_place(reversed(list(traceback.walk_tb(error.__traceback__))))
    return f" ({place})" if place else ""


def users_place(frames: Iterable[tuple[FrameType, int]], *, innermost: bool = False) -> str:
    """Returns the first of `frames`, each with its line, that is in a user's own file, as `reward.py, line 5`; nothing
    if none is, or, with `innermost`, if rollgrad's own code comes before it."""
    own = str(Path(__file__).parents[1])
    known = (sysconfig.get_path("stdlib"), "<")
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith(own):
            if innermost:
                return ""
        elif not file.startswith(known) and "site-packages" not in file:
            return f"{Path(file).name}, line {line}"
    return ""


def shown(value: Any) -> str:
    """Returns the `repr` of a value on one line, whatever its `__repr__` does: also of an integer that Python refuses
    to write out."""
    try:
        return _cut(" ".join(repr(value).split()))
    except BaseException as error:
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"


def harmless(error: BaseException) -> Exception:
    """Returns the error, or its words as a ForeignError where no future takes it or an event loop would end by it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ForeignError(error_text(error))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


class foreign_code(AbstractContextManager[object]):  # noqa: N801 (it is read as a statement)
    """A block that raises `refusal(words)` instead of any exception inside it; `words` are its `error_text`, with
    `located` followed by its `error_place`.

    Three things pass: rollgrad's own errors, which are sentences already; KeyboardInterrupt and GeneratorExit; and the
    cancellation of the task that runs the block, though not a CancelledError that the code raised by itself.
    """

    # No @contextmanager: it lets StopIteration through where the refusal is a RuntimeError.
    def __init__(self, refusal: Callable[[str], Exception], *, located: bool = False) -> None:
        self._refusal = refusal
        self._located = located

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> Literal[False]:
        if error is None or isinstance(error, RollgradError | KeyboardInterrupt | GeneratorExit):
            return False
        import asyncio

        from rollgrad.application.interruption import Interrupted

        if isinstance(error, Interrupted) or (isinstance(error, asyncio.CancelledError) and is_being_cancelled()):
            return False
        words = error_text(error) + (error_place(error) if self._located else "")
        raise self._refusal(words) from error


def is_being_cancelled() -> bool:
    """Returns whether the running task is being cancelled; false in a thread without an event loop."""
    import asyncio

    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0
