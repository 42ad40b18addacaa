"""Rollout: plays n samples of each prompt, many at once, and returns each group as it finishes.

Invariants: at most `max_concurrent` episodes are in flight; every sample ends as a trajectory or as a counted
failure; sample and group ids, and with them the seeds, depend on the position in the run alone, never on timing.
"""

import asyncio
import itertools
import math
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from statistics import fmean
from typing import Any, Protocol, TypeVar

import structlog
from attrs import evolve, field, frozen

from rollgrad.application.rare_warning import RareWarning
from rollgrad.application.rollouts.failure_budget import FailureBudget
from rollgrad.application.rollouts.progress import Progress
from rollgrad.application.rollouts.slots import EpisodeSlots
from rollgrad.domain.algorithms.filtering import BY_FUNCTION, GroupFilter
from rollgrad.domain.control.admission import Admission
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest

log = structlog.get_logger(__name__)
Result = TypeVar("Result")

Episode = list[Trajectory] | RolloutFailure
"""Result of an episode: its branches, or why it has none."""

SILENT_SECONDS = 600.0
"""Seconds without a finished group after which a rollout says what it waits for, and again after as many: an agent or
an environment that hangs would hold it up without a word."""

BOUND = "--rollout.max_episode_seconds"
"""Setting that ends episodes."""

LONG_SECONDS = 3600.0
"""Seconds after which an episode that still plays is told of: where other groups go on, one that hangs keeps its place
for ever, and the run slows down without a word."""

SEED_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, which spreads consecutive sample ids over the whole range of seeds."""


def sample_seed(run_seed: int, sample_id: int) -> int:
    """Returns the sampling seed of sample `sample_id`, from 0 to 2^63 - 1."""
    return ((run_seed + 1) * SEED_MULTIPLIER + sample_id * 0xBF58476D1CE4E5B9) % 2**63


@frozen(kw_only=True, eq=False)
class RolloutGroup:
    """All samples of one prompt."""

    group_id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    failures: tuple[RolloutFailure, ...] = ()
    baseline: float | None = None
    """Reward of the prompt's greedy rollout, if one was played."""
    seconds: Mapping[int, float] = field(factory=dict)
    """Duration of each sample's episode, its reward included, by sample id; empty for a group of a training state."""

    @property
    def samples(self) -> list[tuple[Trajectory, ...]]:
        """Trajectories of each sample, its branches in order."""
        branches: dict[int, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            branches.setdefault(trajectory.sample_id, []).append(trajectory)
        return [tuple(sample) for sample in branches.values()]

    @property
    def of_roles(self) -> list["RolloutGroup"]:
        """The group of each role, whose samples are compared with each other alone; without roles this group."""
        roles = [*dict.fromkeys(trajectory.role for trajectory in self.trajectories)]
        if len(roles) < 2:
            return [self]
        return [evolve(self, trajectories=tuple(t for t in self.trajectories if t.role == role)) for role in roles]

    @property
    def scores(self) -> list[float]:
        """Score of each sample, for evaluation; the mean of its roles'."""
        return [episode_score(sample) for sample in self.samples]

    @property
    def answers(self) -> list[str | None]:
        """Answer of each sample; None where that is unknown."""
        return [sample[0].answer for sample in self.samples]

    @property
    def rewards(self) -> list[float]:
        """Reward of each sample, summed over its branches; the mean of its roles'."""
        return [math.fsum(t.reward for t in sample) / len({t.role for t in sample}) for sample in self.samples]

    def rejection(self, group_filter: GroupFilter) -> str | None:
        """Returns the reason why no role of the group is to be trained on, or None."""
        reasons = [group_filter.rejection(group.scores, group.rewards) for group in self.of_roles]
        if None not in reasons:
            return reasons[0]
        return BY_FUNCTION if group_filter.keeps is not None and not group_filter.keeps(self) else None


class _Scored(Protocol):
    @property
    def role(self) -> str: ...

    @property
    def score(self) -> float: ...


def episode_score(branches: Iterable[_Scored]) -> float:
    """Returns the score of an episode: the mean of its roles', each of whose branches have the same."""
    return fmean({branch.role: branch.score for branch in branches}.values())


class RolloutService:
    """Plays groups of episodes.

    Args:
        executor: plays one episode.
        max_concurrent: episodes in flight at once, or what bounds them; of both pipelines and evaluations each has
            as many places.
        max_failures: failed episodes tolerated in one `stream`; one more raises. None tolerates `FAILURE_SHARE` of its
            episodes.
        seed: run seed, from which each sample's seed is computed.
        progress: is told of each episode that ends.
    """

    def __init__(
        self,
        executor: AgentExecutor,
        *,
        max_concurrent: int | Admission,
        max_failures: int | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self._executor = executor
        self.admission = max_concurrent if isinstance(max_concurrent, Admission) else Admission(max_concurrent)
        """Bound on the episodes in flight."""
        self._max_failures = max_failures
        self._long = RareWarning()
        self._seed = seed
        self.progress = progress or Progress()
        """Shows how far a rollout is."""

    async def stream(
        self,
        prompts: Iterator[Prompt],
        params: SamplingParams,
        *,
        samples: int,
        groups: int,
        refill: Callable[[RolloutGroup], bool] = lambda group: False,
        group_ids: Iterator[int] | None = None,
        greedy_baseline: bool = False,
        judge: Callable[[RolloutGroup], RolloutGroup] = lambda group: group,
        doing: str = "sampling",
        of: int | None = None,
    ) -> AsyncIterator[RolloutGroup]:
        """Yields groups in the order in which they finish, until all that were started have.

        Args:
            prompts: the stream of prompts; which are played depends on the results of `refill`, never on timing.
            params: sampling settings.
            samples: samples of each prompt.
            groups: number of groups started at once.
            refill: whether another group is started after this finished one.
            group_ids: ids of the groups in the order of their prompts; by default from 0.
            greedy_baseline: also play each prompt greedily, for `RolloutGroup.baseline`.
            judge: returns a group with the rewards that depend on several of its samples.
            doing: what the groups are for, shown to people who wait.
            of: number of groups whose episodes the tolerated share of failures is of, where some have been played
                before; by default `groups`.

        Raises:
            RewardError, EngineError: more than `max_failures` episodes failed; the message ends with the last one's.
        """
        slots = self.slots()
        budget = self.failure_budget((of or groups) * samples)
        numbers = itertools.count() if group_ids is None else group_ids
        begun = ended = 0

        def tell() -> None:
            nonlocal ended
            ended += 1
            self.progress.progress(doing, ended, begun)

        def start() -> asyncio.Task[RolloutGroup]:
            nonlocal begun
            begun += samples + greedy_baseline
            return asyncio.create_task(
                self.play(
                    next(prompts),
                    params,
                    samples=samples,
                    group_id=next(numbers),
                    slots=slots,
                    greedy_baseline=greedy_baseline,
                    judge=judge,
                    on_end=tell,
                )
            )

        running = {start() for _ in range(groups)}
        finished: set[asyncio.Task[RolloutGroup]] = set()
        try:
            while running:
                first = partial(asyncio.wait, running, return_when=asyncio.FIRST_COMPLETED)
                finished, running = await not_in_silence(first, len(running))
                for group in (task.result() for task in finished):
                    budget.charge(group.failures)
                    if refill(group):
                        running.add(start())
                    yield group
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, *finished, return_exceptions=True)

    async def collect(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        samples: int,
        done: Collection[int] = (),
        on_group: Callable[[RolloutGroup], object] = lambda group: None,
    ) -> list[RolloutGroup]:
        """Returns the groups of an evaluation, in the order of `prompts`, but for those whose ids are `done`;
        `on_group` is told of each that ends."""
        missing = [number for number in range(len(prompts)) if number not in done]
        stream = self.stream(
            (prompts[number] for number in missing),
            params,
            samples=samples,
            groups=len(missing),
            group_ids=iter(missing),
            doing="evaluating",
            of=len(prompts),
        )
        groups = []
        async for group in stream:
            on_group(group)
            groups.append(group)
        return sorted(groups, key=lambda group: group.group_id)

    def _tell_long(self, request: EpisodeRequest) -> None:
        self._long.tell(
            "an episode is still playing",
            seconds=LONG_SECONDS,
            group_id=request.group_id,
            sample_id=request.sample_id,
            bound=BOUND,
        )

    async def _run(self, request: EpisodeRequest) -> Episode:
        """Plays an episode, and tells of it if it takes long."""
        overdue = asyncio.get_running_loop().call_later(LONG_SECONDS, self._tell_long, request)
        try:
            return await self._executor.run(request)
        finally:
            overdue.cancel()

    def slots(self) -> EpisodeSlots:
        """Returns the places of episodes in flight that the groups of one stream share."""
        return EpisodeSlots(self.admission)

    def failure_budget(self, episodes: int) -> FailureBudget:
        """Returns the failure budget of a rollout of `episodes`."""
        return FailureBudget(self._max_failures, episodes)

    async def play(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        samples: int,
        group_id: int,
        slots: EpisodeSlots,
        greedy_baseline: bool = False,
        judge: Callable[[RolloutGroup], RolloutGroup] = lambda group: group,
        on_end: Callable[[], None] = lambda: None,
    ) -> RolloutGroup:
        """Plays one group; the arguments are as for `stream`, and `on_end` is called after each episode."""
        clock = asyncio.get_running_loop().time
        seconds: dict[int, float] = {}

        async def episode(sample_id: int, settings: SamplingParams) -> Episode:
            seeded = evolve(settings, seed=sample_seed(self._seed, sample_id))
            request = EpisodeRequest(prompt=prompt, params=seeded, group_id=group_id, sample_id=sample_id)
            async with slots:
                started = clock()
                result = await self._run(request)
                if settings is params:  # the greedy baseline is no sample
                    seconds[sample_id] = clock() - started
                on_end()
                return result

        episodes = [episode(group_id * samples + index, params) for index in range(samples)]
        if greedy_baseline:
            episodes.append(episode(group_id * samples, evolve(params, temperature=0.0, top_p=1.0, top_k=0)))
        results = await _all_or_none(episodes)
        sampled, greedy = results[:samples], results[samples:]
        failures = tuple(result for result in results if isinstance(result, RolloutFailure))
        baseline = _baseline(results, greedy[0]) if greedy else None
        played = tuple(t for result in sampled if isinstance(result, list) for t in result)
        if greedy and baseline is None:
            played = ()  # nothing to compare the samples with
        group = RolloutGroup(
            group_id=group_id,
            prompt=prompt,
            trajectories=played,
            failures=failures,
            baseline=baseline,
            seconds=seconds,
        )
        return judge(group)


async def _all_or_none(episodes: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Returns the results of episodes that are played at once; an error of one ends the others before it is raised."""
    tasks = [asyncio.create_task(episode) for episode in episodes]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _baseline(results: Sequence[Episode], greedy: Episode) -> float | None:
    """Returns the reward of the greedy episode, with which the samples are compared; None if it failed.

    Raises:
        ConfigurationError: an episode has several roles, which one number cannot be the baseline of.
    """
    if any(t.role for result in results if isinstance(result, list) for t in result):
        raise ConfigurationError(
            "The episodes have several roles, but one greedy episode is the baseline of them all: set "
            "--algo.advantage.estimator to group_norm or rloo, which compare each role with itself."
        )
    return math.fsum(t.reward for t in greedy) if isinstance(greedy, list) else None


async def not_in_silence(wait: Callable[[], Awaitable[Result]], groups: int) -> Result:
    """Returns what `wait` returns; every `SILENT_SECONDS` it logs that it still waits for `groups` that are being
    played."""
    silent = 0.0
    while True:
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                return await wait()
        except TimeoutError:
            silent += SILENT_SECONDS
            log.warning(
                "no group of episodes has finished",
                seconds=silent,
                groups_in_flight=groups,
                bound=BOUND,
            )
