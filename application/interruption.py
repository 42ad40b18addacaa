"""The end of a run by a signal, as users' code that blocks the run sees it."""

import asyncio


class Interrupted(asyncio.CancelledError):
    """Raised by a signal's handler in users' code that blocks the event loop: the run is being cancelled, of which the
    loop cannot tell its tasks before that code returns."""
