"""How many episodes may fail: each failure is counted and logged, and one too many ends the rollout."""

import math
from collections import Counter
from collections.abc import Iterable

import structlog

from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.errors import EngineError, RewardError, RollgradError

log = structlog.get_logger(__name__)

FAILURE_SHARE = 0.05
"""Share of a rollout's episodes that may fail if no number is set: more than a flaky service fails now and then, and
far less than a broken reward or environment does."""


class FailureBudget:
    """Counts and logs failed episodes; tolerates `allowed` of them, by default `FAILURE_SHARE` of `episodes`."""

    def __init__(self, allowed: int | None, episodes: int) -> None:
        self._allowed = math.ceil(FAILURE_SHARE * episodes) if allowed is None else allowed
        self._failures: Counter[FailureKind] = Counter()

    def charge(self, failed: Iterable[RolloutFailure]) -> None:
        """Adds failures.

        Raises:
            RewardError, EngineError: there are too many; the message ends with the last failure's.
        """
        failures = [failure for failure in failed if failure.kind is not FailureKind.NOT_APPLICABLE]
        self._failures.update(failure.kind for failure in failures)
        if failures and self._failures.total() > self._allowed:
            raise _too_many(failures[-1], self._failures, self._allowed)
        for failure in failures:
            log.warning(
                "an episode failed",
                kind=failure.kind.value,
                reason=failure.message,
                group=failure.group_id,
                sample=failure.sample_id,
                failed=self._failures.total(),
                tolerated=self._allowed,
            )


def _too_many(last: RolloutFailure, failures: Counter[FailureKind], allowed: int) -> RollgradError:
    kind = RewardError if last.kind is FailureKind.REWARD else EngineError
    if allowed == 0:
        return kind(last.message)
    counts = ", ".join(f"{count} {name.value}" for name, count in failures.items())
    return kind(
        f"{failures.total()} episodes failed ({counts}), and {allowed} may (--rollout.max_failures); the last one: "
        f"{last.message}"
    )
