"""Rollout: plays n samples of each prompt, many at once, and hands over each group as it finishes.

Invariants: at most `max_concurrent` episodes are in flight; every sample ends as a trajectory or as a counted
failure; sample and group ids, and with them the seeds, depend on the position in the run alone, never on timing.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from attrs import evolve, frozen

from rollgrad.domain.errors import EngineError, RewardError, RollgradError
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest
from rollgrad.domain.prompts import Prompt
from rollgrad.domain.rewards import FailureKind, RolloutFailure
from rollgrad.domain.sampling import SamplingParams
from rollgrad.domain.trajectory import Trajectory

SEED_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: spreads consecutive sample ids over the whole range of seeds."""


def sample_seed(run_seed: int, sample_id: int) -> int:
    """The sampling seed of sample `sample_id`, from 0 to 2^63 - 1."""
    return ((run_seed + 1) * SEED_MULTIPLIER + sample_id * 0xBF58476D1CE4E5B9) % 2**63


@frozen(kw_only=True, eq=False)
class RolloutGroup:
    """All samples of one prompt."""

    group_id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    failures: tuple[RolloutFailure, ...] = ()


class RolloutService:
    """Plays groups of episodes.

    Args:
        executor: plays one episode.
        max_concurrent: episodes in flight at once.
        max_failures: failed episodes tolerated in one `stream`; one more raises.
        seed: run seed, from which each sample's own seed follows.
    """

    def __init__(self, executor: AgentExecutor, *, max_concurrent: int, max_failures: int = 0, seed: int = 0) -> None:
        self._executor = executor
        self._max_concurrent = max_concurrent
        self._max_failures = max_failures
        self._seed = seed

    async def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, samples: int, first_group_id: int = 0
    ) -> AsyncIterator[RolloutGroup]:
        """Groups in the order in which they finish.

        Raises:
            RewardError, EngineError: more than `max_failures` episodes failed; the message is the last failure's.
        """
        slots = asyncio.Semaphore(self._max_concurrent)
        failures: Counter[FailureKind] = Counter()
        tasks = [
            asyncio.create_task(self._play(prompt, params, samples, first_group_id + offset, slots))
            for offset, prompt in enumerate(prompts)
        ]
        try:
            for finished in asyncio.as_completed(tasks):
                group = await finished
                failures.update(failure.kind for failure in group.failures)
                if failures.total() > self._max_failures:
                    raise _too_many(group.failures[-1], failures, self._max_failures)
                yield group
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def collect(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, samples: int, first_group_id: int = 0
    ) -> list[RolloutGroup]:
        """All groups, in the order of `prompts`."""
        groups = [g async for g in self.stream(prompts, params, samples=samples, first_group_id=first_group_id)]
        return sorted(groups, key=lambda group: group.group_id)

    async def _play(
        self, prompt: Prompt, params: SamplingParams, samples: int, group_id: int, slots: asyncio.Semaphore
    ) -> RolloutGroup:
        async def one(sample_id: int) -> list[Trajectory] | RolloutFailure:
            async with slots:
                seeded = evolve(params, seed=sample_seed(self._seed, sample_id))
                return await self._executor.run(
                    EpisodeRequest(prompt=prompt, params=seeded, group_id=group_id, sample_id=sample_id)
                )

        results = await asyncio.gather(*(one(group_id * samples + index) for index in range(samples)))
        return RolloutGroup(
            group_id=group_id,
            prompt=prompt,
            trajectories=tuple(t for result in results if isinstance(result, list) for t in result),
            failures=tuple(result for result in results if isinstance(result, RolloutFailure)),
        )


def _too_many(last: RolloutFailure, failures: "Counter[FailureKind]", allowed: int) -> RollgradError:
    kind = RewardError if last.kind is FailureKind.REWARD else EngineError
    if allowed == 0:
        return kind(last.message)
    counts = ", ".join(f"{count} {name.value}" for name, count in failures.items())
    return kind(
        f"{failures.total()} episodes failed ({counts}), more than --rollout.max-failures {allowed}; "
        f"the last one: {last.message}"
    )
