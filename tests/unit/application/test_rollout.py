"""Groups stream as they finish, within the limit of episodes in flight, whatever the timing."""

import asyncio
from collections import Counter
from collections.abc import Collection

import pytest
import structlog
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.application.rollouts import groups as groups_module
from rollgrad.application.rollouts.groups import RolloutGroup, RolloutService, sample_seed
from rollgrad.application.rollouts.kept import group_of_state, group_state
from rollgrad.application.rollouts.metrics import rollout_metrics
from rollgrad.application.rollouts.progress import Progress
from rollgrad.domain.algorithms.filtering import GroupFilter
from rollgrad.domain.episodes.generation import Generation, SamplingParams, StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.domain.errors import ConfigurationError, EngineError, RewardError
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.domain.ports.progress import ShowsProgress
from rollgrad.testing.agent_executor import FakeAgentExecutor, make_trajectory, reply_with_sample_id
from rollgrad.testing.metric_sink import FakeMetricSink

PARAMS = SamplingParams(max_new_tokens=4)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(token_ids=(index + 1,), text=str(index)) for index in range(count)]


def failing(*sample_ids: int, kind: FailureKind = FailureKind.REWARD) -> FakeAgentExecutor:
    def play(request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        if request.sample_id not in sample_ids:
            return reply_with_sample_id(request)
        message = f"sample {request.sample_id} broke"
        return RolloutFailure(kind=kind, message=message, group_id=request.group_id, sample_id=request.sample_id)

    return FakeAgentExecutor(play)


async def collect(service: RolloutService, count: int, samples: int, done: Collection[int] = ()) -> list[RolloutGroup]:
    return await service.collect(prompts(count), PARAMS, samples=samples, done=done)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 30), st.randoms(use_true_random=False))
async def test_groups_come_in_order_of_prompts_whatever_finishes_first(
    count: int, samples: int, limit: int, chance: "object"
) -> None:
    executor = FakeAgentExecutor(delay=lambda request: chance.randint(0, 9))  # type: ignore[attr-defined]
    done = chance.sample(range(count), chance.randint(0, count))  # type: ignore[attr-defined]
    groups = await collect(RolloutService(executor, max_concurrent=limit), count, samples, done)
    missing = [index for index in range(count) if index not in done]
    assert [g.group_id for g in groups] == missing
    assert [g.prompt.text for g in groups] == [str(index) for index in missing]
    for group in groups:
        ids = [t.sample_id for t in group.trajectories]
        assert ids == [group.group_id * samples + index for index in range(samples)]
        assert {t.group_id for t in group.trajectories} == {group.group_id}
    assert executor.peak <= limit
    assert executor.in_flight == 0


async def test_the_limit_is_used_in_full() -> None:
    executor = FakeAgentExecutor(delay=lambda request: 5)
    await collect(RolloutService(executor, max_concurrent=6), 5, 4)
    assert executor.peak == 6


async def test_groups_stream_as_they_finish() -> None:
    executor = FakeAgentExecutor(delay=lambda request: 50 - 10 * request.group_id)
    service = RolloutService(executor, max_concurrent=100)

    assert (
        [
            (group.group_id, executor.in_flight)
            async for group in service.stream(iter(prompts(4)), PARAMS, samples=2, groups=4)
        ]
    ) == [(3, 6), (2, 4), (1, 2), (0, 0)]


class Shown(FakeMetricSink, ShowsProgress):
    """A sink that keeps what it was told of progress."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int, int]] = []

    def progress(self, doing: str, done: int, of: int) -> None:
        self.told.append((doing, done, of))


async def test_the_sink_is_told_of_every_episode_that_ends_also_of_groups_that_take_the_place_of_others() -> None:
    sink, progress, refilled = Shown(), Progress(), iter([True, False, False])
    service = RolloutService(failing(1), max_concurrent=1, max_failures=2, progress=progress)
    assert progress.to(sink) is sink
    stream = service.stream(iter(prompts(3)), PARAMS, samples=2, groups=2, refill=lambda group: next(refilled))
    assert len([group async for group in stream]) == 3
    assert [done for _, done, _ in sink.told] == [1, 2, 3, 4, 5, 6]
    assert sink.told[0] == ("sampling", 1, 4)
    assert sink.told[-1] == ("sampling", 6, 6)
    await collect(service, 1, 2)
    assert sink.told[-1] == ("evaluating", 2, 2)
    progress.to(FakeMetricSink())
    await collect(service, 1, 2)
    assert len(sink.told) == 8


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5), st.integers(1, 8), st.randoms(use_true_random=False))
async def test_seeds_depend_on_the_place_in_the_run_alone(run_seed: int, limit: int, chance: "object") -> None:
    executor = FakeAgentExecutor(delay=lambda request: chance.randint(0, 5))  # type: ignore[attr-defined]
    await collect(RolloutService(executor, max_concurrent=limit, seed=run_seed), 10, 4, done=range(7))
    seeds = {request.sample_id: request.params.seed for request in executor.requests}
    assert seeds == {sample: sample_seed(run_seed, sample) for sample in range(28, 40)}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sets(st.integers(0, 2**31), min_size=2, max_size=200))
def test_no_two_samples_share_a_seed(run_seed: int, samples: set[int]) -> None:
    seeds = {sample_seed(run_seed, sample) for sample in samples}
    assert len(seeds) == len(samples)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # torch's CPU generator reads the low 32 bits only, so they must differ by themselves.
    assert len({seed % 2**32 for seed in seeds}) == len(samples)


def test_runs_with_other_seeds_draw_other_samples() -> None:
    assert not {sample_seed(1, n) for n in range(5000)} & {sample_seed(2, n) for n in range(5000)}


async def test_settings_other_than_the_seed_reach_the_executor() -> None:
    executor = FakeAgentExecutor()
    await collect(RolloutService(executor, max_concurrent=2), 1, 2)
    assert all(request.params.max_new_tokens == 4 for request in executor.requests)


async def test_failures_within_the_budget_are_counted_with_their_group() -> None:
    groups = await collect(RolloutService(failing(1, 4), max_concurrent=4, max_failures=2), 3, 2)
    assert [len(g.trajectories) for g in groups] == [1, 2, 1]
    assert Counter(f.sample_id for g in groups for f in g.failures) == {1: 1, 4: 1}
    submitted = sum(len(g.trajectories) + len(g.failures) for g in groups)
    assert submitted == 6


async def test_a_reply_that_no_reward_applies_to_is_in_no_budget() -> None:
    groups = await collect(RolloutService(failing(1, 4, kind=FailureKind.NOT_APPLICABLE), max_concurrent=4), 3, 2)
    assert [len(g.trajectories) for g in groups] == [1, 2, 1]
    assert [f.sample_id for g in groups for f in g.failures] == [1, 4]


async def test_the_first_failure_ends_a_run_without_budget() -> None:
    with pytest.raises(RewardError, match=r"^sample 1 broke$"):
        await collect(RolloutService(failing(1), max_concurrent=4, max_failures=0), 3, 2)


async def test_one_failure_too_many_says_how_many_of_which_kind() -> None:
    service = RolloutService(failing(0, 2, 4, kind=FailureKind.INFRASTRUCTURE), max_concurrent=1, max_failures=2)
    with pytest.raises(
        EngineError, match=r"3 episodes.* failed \(3 infrastructure\), and 2 may \(--rollout\.max_failures\).*sample 4"
    ):
        await collect(service, 3, 2)


async def test_each_stream_has_its_own_budget() -> None:
    service = RolloutService(failing(0), max_concurrent=4, max_failures=1)
    for _ in range(3):
        assert len(await collect(service, 2, 2)) == 2


async def test_several_roles_have_no_greedy_episode_for_a_baseline() -> None:
    class Sides(FakeAgentExecutor):
        async def run(self, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
            played = await super().run(request)
            assert isinstance(played, list)
            return [evolve(trajectory, role=role) for trajectory in played for role in ("first", "second")]

    service = RolloutService(Sides(), max_concurrent=2)
    with pytest.raises(ConfigurationError, match=r"several roles.* set --algo.advantage.estimator"):
        await service.play(prompts(1)[0], PARAMS, samples=1, group_id=0, slots=service.slots(), greedy_baseline=True)


async def test_a_misconfiguration_ends_the_run_and_leaves_nothing_behind() -> None:
    def play(request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        if request.sample_id == 3:
            raise ConfigurationError("too long")
        return reply_with_sample_id(request)

    executor = FakeAgentExecutor(play, delay=lambda request: 1 if request.sample_id == 3 else 1000)
    with pytest.raises(ConfigurationError, match="too long"):
        await collect(RolloutService(executor, max_concurrent=100, max_failures=5), 4, 2)
    assert executor.in_flight == 0


async def test_a_rollout_that_nothing_of_finishes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "SILENT_SECONDS", 0.01)
    with structlog.testing.capture_logs() as logs:
        playing = asyncio.create_task(
            collect(RolloutService(FakeAgentExecutor(delay=lambda request: 10**9), max_concurrent=9), 3, 2)
        )
        async with asyncio.timeout(60):
            while len(logs) < 2:
                await asyncio.sleep(0.001)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    assert [log["event"] for log in logs[:2]] == ["no group of episodes has finished"] * 2
    assert (logs[0]["groups_in_flight"], logs[0]["bound"]) == (3, "--rollout.max_episode_seconds")
    assert logs[1]["seconds"] == pytest.approx(0.02)


async def test_an_episode_that_hangs_beside_others_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "LONG_SECONDS", 0.05)
    executor = FakeAgentExecutor(delay=lambda request: 10**9 if request.sample_id == 3 else 1)
    with structlog.testing.capture_logs() as logs:
        stream = RolloutService(executor, max_concurrent=9).stream(iter(prompts(4)), PARAMS, samples=2, groups=4)
        finished = [(await anext(stream)).group_id for _ in range(3)]
        async with asyncio.timeout(60):
            while not logs:
                await asyncio.sleep(0.001)
        await stream.aclose()
    assert sorted(finished) == [0, 2, 3]
    (told,) = logs
    assert told["event"] == "an episode is still playing"
    assert (told["group_id"], told["sample_id"], told["bound"]) == (1, 3, "--rollout.max_episode_seconds")


async def test_cancelling_cancels_every_episode() -> None:
    executor = FakeAgentExecutor(delay=lambda request: 10_000)
    service = RolloutService(executor, max_concurrent=3)

    task = asyncio.create_task(service.collect(prompts(4), PARAMS, samples=2))
    while executor.in_flight < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert executor.in_flight == 0
    assert len(asyncio.all_tasks()) == 1
    assert len(executor.requests) == 3


async def test_leaving_a_stream_early_cancels_the_rest() -> None:
    executor = FakeAgentExecutor(delay=lambda request: 1 if request.group_id == 0 else 10_000)

    stream = RolloutService(executor, max_concurrent=100).stream(iter(prompts(3)), PARAMS, samples=2, groups=3)
    assert (await anext(stream)).group_id == 0
    await stream.aclose()  # type: ignore[attr-defined]
    assert executor.in_flight == 0


def test_replies_are_compared_with_others_of_their_group_and_rewards_with_lengths() -> None:
    def group(number: int, *replies: tuple[int, float]) -> RolloutGroup:
        played = tuple(
            make_trajectory([1], [2] * length, group_id=number, sample_id=i, rewards=[reward])
            for i, (length, reward) in enumerate(replies)
        )
        return RolloutGroup(group_id=number, prompt=Prompt(token_ids=(1,), text="a"), trajectories=played)

    metrics = rollout_metrics(
        [group(0, (2, 0.0), (2, 0.0), (2, 0.0)), group(1, (2, 0.0), (4, 1.0))], pass_threshold=0.5
    )
    assert metrics["rollout/duplicate_share"] == pytest.approx(0.4)
    assert metrics["rollout/reward_length_correlation"] == pytest.approx(1.0)
    for rewards in ((0.0, 0.0), (1e-170, 2e-170)):  # the second have no squares
        alike = [group(0, *zip((2, 4), rewards, strict=True))]
        assert "rollout/reward_length_correlation" not in rollout_metrics(alike, 0.5)


def test_each_datasource_has_metrics_of_its_own() -> None:
    """They are those of its groups alone; one datasource has none beside the whole rollout's."""

    def played(number: int, name: str, *scores: float) -> RolloutGroup:
        trajectories = tuple(
            evolve(make_trajectory([1], [2] * (number + 1), group_id=number, sample_id=i, rewards=[score]), score=score)
            for i, score in enumerate(scores)
        )
        prompt = Prompt(token_ids=(1,), text="a", datasource=name)
        return RolloutGroup(group_id=number, prompt=prompt, trajectories=trajectories)

    lost = RolloutGroup(group_id=9, prompt=Prompt(token_ids=(1,), text="a", datasource="lost"), trajectories=())
    groups = [played(0, "math", 0.0, 1.0), played(1, "code", 1.0, 1.0), played(2, "math", 0.5, 0.5), lost]
    metrics = rollout_metrics(groups, 0.5)
    names = ("reward/mean", "reward/score_mean", "rollout/response_length_mean", "rollout/zero_spread_share")
    for source in ("math", "code"):
        alone = rollout_metrics([group for group in groups if group.prompt.datasource == source], 0.5)
        assert {name: metrics[f"{name}/{source}"] for name in names} == {name: alone[name] for name in names}
        assert not [name for name in alone if name.endswith(source)]
    assert metrics["rollout/zero_spread_share/math"] == 0.5
    assert not [name for name in metrics if name.endswith("lost")]


def test_the_branches_of_a_sample_count_once() -> None:
    def branch(sample_id: int, reward: float, tokens: int) -> Trajectory:
        builder = TrajectoryBuilder([1], group_id=0, sample_id=sample_id)
        builder.add_action(
            Generation(
                token_ids=[2] * tokens, logprobs=[-1.0] * tokens, versions=[0] * tokens, stop_reason=StopReason.STOP
            )
        )
        builder.set_reward(reward)
        return builder.build(stop_reason=StopReason.STOP, score=1.0 - sample_id, metrics={"branches": 3.0 - sample_id})

    branches = (branch(0, 0.0, 2), branch(0, 0.0, 3), branch(0, 1.0, 4), branch(1, 0.0, 1), branch(1, 0.5, 2))
    group = RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1,), text="a"), trajectories=branches)
    assert group.samples == [branches[:3], branches[3:]]
    assert (group.scores, group.rewards) == ([1.0, 0.0], [1.0, 0.5])
    metrics = rollout_metrics([group], pass_threshold=0.5)
    assert [metrics[f"reward/{name}"] for name in ("mean", "min", "max")] == [0.75, 0.5, 1.0]
    assert metrics["reward/score_mean"] == 0.5
    assert metrics["rollout/samples"] == 2.0
    assert metrics["rollout/response_length_mean"] == 6.0
    assert metrics["rollout/response_length_passed"] == 9.0
    assert metrics["reward/branches"] == 2.5


def test_roles_are_compared_with_themselves_alone() -> None:
    """The sides' rewards differ in each game, which says nothing of whether one of them can learn from it."""

    def group(*games: tuple[float, float]) -> RolloutGroup:
        played = tuple(
            evolve(make_trajectory([1], [2], group_id=0, sample_id=i, rewards=[reward]), role=role)
            for i, rewards in enumerate(games)
            for role, reward in zip(("first", "second"), rewards, strict=True)
        )
        return RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1,), text="a"), trajectories=played)

    spread = GroupFilter(need_spread=True, score_spread=True)
    always, split, one_side = group((1, -1), (1, -1)), group((1, -1), (-1, 1)), group((1, -1), (1, 0))
    assert always.rejection(spread) == "too_easy"
    assert split.rejection(spread) is one_side.rejection(spread) is None
    assert (always.scores, one_side.rewards) == ([0.0, 0.0], [0.0, 0.5])
    metrics = rollout_metrics([one_side], pass_threshold=1.0)
    assert metrics["rollout/zero_spread_share"] == 0.5
    assert (metrics["reward/mean/first"], metrics["reward/mean/second"]) == (1.0, -0.5)
    assert group_of_state(group_state(split), split.prompt).rewards == split.rewards
    assert [len(part.trajectories) for part in group_of_state(group_state(split), split.prompt).of_roles] == [2, 2]


def test_a_metric_of_ones_own_does_not_take_the_place_of_the_rewards_mean() -> None:
    builder = TrajectoryBuilder([1], group_id=0, sample_id=0)
    builder.add_action(Generation(token_ids=[2], logprobs=[-1.0], versions=[0], stop_reason=StopReason.STOP))
    builder.set_reward(1.0)
    trajectory = builder.build(stop_reason=StopReason.STOP, metrics={"mean": 7.0, "max": 8.0, "words": 9.0})
    group = RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1,), text="a"), trajectories=(trajectory,))
    metrics = rollout_metrics([group], pass_threshold=0.5)
    assert [metrics[f"reward/{name}"] for name in ("mean", "max", "words")] == [1.0, 1.0, 9.0]


def test_scores_that_differ_by_rounding_alone_are_no_spread() -> None:
    """Else a run whose estimator finds no difference would not be told that it cannot learn."""
    played = tuple(
        make_trajectory([1], [2], sample_id=place, rewards=[reward]) for place, reward in enumerate((0.3, 0.1 + 0.2))
    )
    group = RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1,), text="a"), trajectories=played)
    assert rollout_metrics([group], pass_threshold=0.5)["rollout/zero_spread_share"] == 1.0


def test_an_episode_is_truncated_if_one_of_its_branches_is() -> None:
    """OpenRLHF's executors say it of each."""
    played = tuple(make_trajectory([1], [2], stop_reason=reason) for reason in (StopReason.STOP, StopReason.LENGTH))
    group = RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1,), text="a"), trajectories=played)
    assert rollout_metrics([group], pass_threshold=0.5)["rollout/truncated_share"] == 1.0


def test_a_function_of_ones_own_filters_groups() -> None:
    def group(*rewards: float) -> RolloutGroup:
        played = [make_trajectory([1], [2], group_id=0, sample_id=i, rewards=[r]) for i, r in enumerate(rewards)]
        return RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1,), text="a"), trajectories=tuple(played))

    best = GroupFilter(score_spread=True, keeps=lambda group: max(group.rewards) > 1)
    assert group(0, 2).rejection(best) is None
    assert group(0, 1).rejection(best) == "by_function"
    assert group(2, 2).rejection(best) == "too_easy", "asked of groups that meet the other conditions"
