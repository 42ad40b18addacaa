"""Calls that are made again where they fail in passing."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from stamina.instrumentation import RetryDetails, RetryHook


class PassingError(Exception):
    """An attempt failed in a way that another may not."""


class Attempt(AbstractContextManager[None], Protocol):
    """An attempt: a `PassingError` in its block is followed by the next one, of the last it is raised. `num`: its
    number, from 1."""

    num: int


def attempts(most: int | None, *, wait: float) -> AsyncIterator[Attempt]:
    """Yields up to `most` attempts (None: as many as the caller waits for); before the second it waits `wait` seconds
    and up to as many by chance, before each further one twice as long, up to 5 s."""
    import stamina

    _leave_reports_to_callers()
    made: Any = stamina.retry_context(on=PassingError, attempts=most, timeout=None, wait_initial=wait, wait_jitter=wait)
    return made  # type: ignore[no-any-return]


@cache
def _leave_reports_to_callers() -> None:
    """Keeps stamina from logging each attempt after a `PassingError`; it goes on to report others, which are of users'
    code."""
    from stamina import instrumentation

    def but_ours(hook: "RetryHook") -> "RetryHook":
        def report(details: "RetryDetails") -> Any:
            return None if isinstance(details.caused_by, PassingError) else hook(details)

        return report

    instrumentation.set_on_retry_hooks([but_ours(hook) for hook in instrumentation.get_on_retry_hooks()])
