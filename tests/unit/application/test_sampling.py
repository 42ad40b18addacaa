"""Which groups are handed out: refill, budget, over-sampling, curriculum; the same whatever the timing."""

import asyncio
import random
from collections.abc import Callable

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.application.rollouts.groups import RolloutGroup, RolloutService
from rollgrad.application.rollouts.prompt_dealer import PromptDealer
from rollgrad.application.rollouts.sampler import GroupSampler, SamplingPlan
from rollgrad.domain.algorithms.curriculum import Curriculum
from rollgrad.domain.algorithms.filtering import GroupFilter
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.images import Image, PlacedImage
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import RewardError
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.testing.agent_executor import FakeAgentExecutor, make_trajectory, reply_with_sample_id
from rollgrad.testing.prompt_source import FakePromptSource

PROMPTS = [Prompt(token_ids=(index + 1,), text=str(index)) for index in range(12)]


def solved(*texts: str, delay: Callable[[EpisodeRequest], int] = lambda request: 1) -> FakeAgentExecutor:
    """Every sample of these prompts scores 1; of the others every second one does."""

    def play(request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        greedy = request.params.temperature == 0
        score = 1.0 if request.prompt.text in texts or greedy else float(request.sample_id % 2)
        ids = {"group_id": request.group_id, "sample_id": request.sample_id}
        return [make_trajectory([1], [2, 3], rewards=[score], **ids)]

    return FakeAgentExecutor(play, delay=delay)


def sampler(executor: FakeAgentExecutor, curriculum: Curriculum | None = None, **plan: object) -> GroupSampler:
    defaults: dict[str, object] = {"groups": 3, "samples": 2, "in_flight": 3}
    return GroupSampler(
        RolloutService(executor, max_concurrent=100),
        FakePromptSource(PROMPTS),
        SamplingParams(max_new_tokens=4),
        SamplingPlan(**(defaults | plan)),  # type: ignore[arg-type]
        curriculum,
    )


def take(source: GroupSampler, rollouts: int) -> list[tuple[list[str], dict[str, float]]]:
    async def scenario() -> list[tuple[list[str], dict[str, float]]]:
        found = []
        for left in range(rollouts, 0, -1):
            groups, metrics = await source.take(left)
            found.append(([group.prompt.text for group in groups], metrics))
        return found

    return asyncio.run(scenario())


KEEP_MIXED = GroupFilter(score_range=(0.0, 1.0))


def test_each_rejected_group_is_replaced_by_the_next_prompt() -> None:
    (first, metrics), (second, _) = take(sampler(solved("1", "3"), group_filter=KEEP_MIXED), 2)
    assert first == ["0", "2", "4"]
    assert second == ["5", "6", "7"]
    assert metrics["rollout/rejected_too_easy"] == 2
    assert metrics["rollout/prompts_played"] == 5
    assert metrics["reward/score_mean_before_filter"] == pytest.approx((3 * 0.5 + 2 * 1.0) / 5)


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 11), max_size=7), st.integers(0, 10**6), st.integers(3, 7))
def test_timing_changes_nothing(easy: set[int], seed: int, in_flight: int) -> None:
    texts = tuple(map(str, easy))
    chance = random.Random(seed)
    slow = solved(*texts, delay=lambda request: chance.randint(0, 9))

    def taken(executor: FakeAgentExecutor) -> list[tuple[list[str], dict[str, float]]]:
        return take(sampler(executor, group_filter=KEEP_MIXED, in_flight=in_flight), 2)

    assert taken(slow) == taken(solved(*texts))


def test_the_budget_ends_in_a_clear_error() -> None:
    everything = solved(*map(str, range(12)))
    with pytest.raises(
        RewardError, match=r"6 prompts were played for 3 groups.*only \d \(\d too easy\).*filtering_budget"
    ):
        take(sampler(everything, group_filter=KEEP_MIXED, budget=2.0), 1)


def test_over_sampling_keeps_the_rest_and_loses_nothing_at_the_end() -> None:
    executor = solved("1")
    taken = take(sampler(executor, group_filter=KEEP_MIXED, in_flight=5), 3)
    assert [groups for groups, _ in taken] == [["0", "2", "3"], ["4", "5", "6"], ["7", "8", "9"]]
    assert [metrics["rollout/kept_for_next"] for _, metrics in taken] == [1, 3, 0]
    played = {request.prompt.text for request in executor.requests}
    assert played == {str(index) for index in range(10)}, "no prompt was played for nothing"


async def test_a_greedy_baseline_is_played_beside_the_samples() -> None:
    executor = solved()
    source = sampler(executor, greedy_baseline=True)
    groups, _ = await source.take(1)
    assert [group.baseline for group in groups] == [1.0] * 3
    assert all(len(group.trajectories) == 2 for group in groups)
    assert sum(request.params.temperature == 0 for request in executor.requests) == 3


async def test_a_failed_baseline_leaves_the_group_out() -> None:
    def play(request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        if request.params.temperature == 0 and request.group_id == 1:
            return request.failure(FailureKind.REWARD, "broke")
        return reply_with_sample_id(request)

    service = RolloutService(FakeAgentExecutor(play), max_concurrent=9, max_failures=1)
    plan = SamplingPlan(groups=3, samples=2, in_flight=3, greedy_baseline=True)
    source = GroupSampler(service, FakePromptSource(PROMPTS), SamplingParams(max_new_tokens=4), plan)
    groups, metrics = await source.take(1)
    assert [group.group_id for group in groups] == [0, 2]
    assert metrics["rollout/rejected_empty"] == 1


def test_curriculum_passes_over_what_is_solved() -> None:
    curriculum = Curriculum(limits=(0.0, 0.9), revisit=2)
    source = sampler(solved("0", "1"), curriculum)
    taken = [groups for groups, _ in take(source, 8)]
    assert taken[:4] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7", "8"], ["9", "10", "11"]]
    assert taken[4] == ["2", "3", "4"], "0 and 1 are solved"
    assert ["0", "1", "2"] in taken[7:8] or taken[7] == ["11", "0", "1"], "and come back the second time"


def test_curriculum_tells_prompts_of_one_text_apart() -> None:
    def shown(digest: str) -> tuple[PlacedImage, ...]:
        return (PlacedImage(image=Image(digest=digest, data=b"", tensors={}), start=0, stop=1),)

    alike = Prompt(token_ids=(1,), text="What is it?")
    prompts = [
        evolve(alike, label="a dog", images=shown("dog")),
        evolve(alike, label="a cat", images=shown("cat")),
        evolve(alike, label="a cat", images=shown("another cat")),
        evolve(alike, metadata={"seed": 1}),
        evolve(alike, metadata={"seed": 2}),
    ]
    dealer = PromptDealer(FakePromptSource(prompts), Curriculum(limits=(0.1, 0.9)))
    first = dealer.deal()
    played = make_trajectory([1], [2], rewards=[1.0], group_id=0, sample_id=0)
    dealer.learn([RolloutGroup(group_id=0, prompt=first.prompt, trajectories=(played,))])
    assert [dealer.deal().prompt for _ in range(4)] == prompts[1:], "nothing is known of the others"
    assert dealer.deal().prompt == prompts[1], "the first is solved"


@pytest.mark.parametrize(("wins", "again"), [(0.5, True), (1.0, False)], ids=["even", "one side wins all"])
def test_curriculum_keeps_games_that_one_of_the_roles_can_learn_from(wins: float, again: bool) -> None:
    """In a game without a draw the scores of both sides have the mean 0, whatever happens."""
    prompts = [Prompt(token_ids=(1,), text=text) for text in ("a", "b")]
    dealer = PromptDealer(FakePromptSource(prompts), Curriculum(limits=(-0.9, -0.1)))
    first = dealer.deal()
    played = tuple(
        evolve(make_trajectory([1], [2], rewards=[sign * reward], group_id=0, sample_id=sample), role=role)
        for sample, reward in enumerate((1.0, 1.0, 1.0, 1.0 if wins == 1.0 else -0.5))
        for role, sign in (("first", 1), ("second", -1))
    )
    dealer.learn([RolloutGroup(group_id=0, prompt=first.prompt, trajectories=played)])
    dealer.deal()
    assert (dealer.deal().prompt == first.prompt) is again


def test_state_continues_the_stream() -> None:
    source = sampler(solved(), Curriculum(limits=(0.0, 0.9)))
    take(source, 1)
    other = sampler(solved(), Curriculum(limits=(0.0, 0.9)))
    other.load_state_dict(source.state_dict())
    assert take(other, 1)[0] == take(source, 1)[0]
    assert other.state_dict() == source.state_dict()


async def test_a_rollout_that_is_cancelled_leaves_the_stream_where_it_began() -> None:
    executor = solved(delay=lambda request: 10**6 if request.group_id == 4 else 0)
    source = sampler(executor, curriculum=Curriculum(limits=(0.4, 0.6)))

    first, _ = await source.take(3)
    assert [group.group_id for group in first] == [0, 1, 2]
    before = source.state_dict()
    task = asyncio.create_task(source.take(2))
    while len(executor.requests) < 12:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert source.state_dict() == before
