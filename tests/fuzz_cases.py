"""Bad inputs, and the ends that each of them may come to (`tests.fuzz`)."""

import random
import signal
from collections.abc import Callable

from attrs import frozen

from rollgrad.domain.errors import RollgradError

SECONDS = 300.0
"""For one case: most take milliseconds, and the first one imports its libraries; only a hang reaches it."""


class HangError(KeyboardInterrupt):
    """The case did not end. No boundary takes it for the foreign code's."""


@frozen
class Case:
    """`run` ends, or raises one of rollgrad's errors; `refused`: it has to raise one."""

    name: str
    run: Callable[[], object]
    refused: bool = False


def outcome(case: Case) -> str | None:
    """Returns what is wrong with what became of a case; None if nothing is."""

    def late(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        case.run()
    except RollgradError as error:
        return None if str(error).strip() and "Traceback" not in str(error) else f"{case.name}: says nothing"
    except HangError:
        return f"{case.name}: hangs"
    except BaseException as error:
        return f"{case.name}: {type(error).__name__} {error!s:.200}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return f"{case.name}: accepted" if case.refused else None


def flipped(draw: random.Random, content: bytes) -> bytes:
    """The content with some bytes flipped, cut, swapped or put in; never the same."""
    changed = bytearray(content)
    while bytes(changed) == content:
        place, other = draw.randrange(len(content)), draw.randrange(len(content))
        how = draw.randrange(4)
        if how == 0:
            changed[place] ^= 1 << draw.randrange(8)
        elif how == 1:
            del changed[place:]
        elif how == 2:
            changed[place], changed[other] = changed[other], changed[place]
        else:
            changed[place:place] = draw.randbytes(draw.choice([1, 8, 100]))
        if not changed:
            return b""
    return bytes(changed)
