"""Evaluation summarises what the rollout service played."""

from asyncio import CancelledError
from collections.abc import Sequence
from typing import Any, cast

import pytest
from attrs import evolve
from structlog.testing import capture_logs

from rollgrad.application.rollouts.evaluation import EvaluationService
from rollgrad.application.rollouts.groups import RolloutGroup, RolloutService
from rollgrad.application.rollouts.results import PromptResult
from rollgrad.application.rollouts.trajectory_log import TrajectoryLog
from rollgrad.domain.algorithms.evaluation import MOST_SETS, summarise, summary_names
from rollgrad.domain.algorithms.filtering import GroupFilter
from rollgrad.domain.episodes.generation import SamplingParams, StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import EngineError, RewardError
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.testing.agent_executor import FakeAgentExecutor, make_trajectory

SCORES = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.5, 0.0]}
"""Scores of the two samples of each prompt."""


def play(request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
    score = SCORES[request.prompt.text][request.sample_id % 2]
    reason = StopReason.LENGTH if score == 0 else StopReason.STOP
    actions = [7] * (1 + request.group_id)
    return [
        make_trajectory(
            request.prompt.token_ids,
            actions,
            group_id=request.group_id,
            sample_id=request.sample_id,
            rewards=[score],
            stop_reason=reason,
        )
    ]


class KeptEvaluations(TrajectoryLog):
    """Keeps the prompts of evaluations by their steps."""

    def __init__(self) -> None:
        self.prompts: dict[int, list[str]] = {}

    def evaluation(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        self.prompts[step] = [group.prompt.text for group in groups]


def evaluating(sources: dict[str, str], executor: FakeAgentExecutor, **settings: float) -> EvaluationService:
    prompts = [Prompt(token_ids=(1,), text=text, datasource=source) for text, source in sources.items()]
    return EvaluationService(
        RolloutService(executor, max_concurrent=3, max_failures=int(settings.get("max_failures", 0))),
        prompts,
        SamplingParams(temperature=0.0),
        samples=2,
        threshold=settings.get("threshold", 1.0),
    )


async def evaluate(sources: dict[str, str], executor: FakeAgentExecutor, **settings: float) -> dict[str, float]:
    return await evaluating(sources, executor, **settings).run()


async def test_passes_means_lengths_and_truncation() -> None:
    metrics = await evaluate({"a": "x", "b": "x", "c": "x"}, FakeAgentExecutor(play))
    assert metrics == pytest.approx(
        {
            "eval/pass@1": (0.5 + 1 + 0) / 3,
            "eval/pass@2": (1 + 1 + 0) / 3,
            "eval/mean@2": (0.5 + 1 + 0.25) / 3,
            "eval/best@2": (1 + 1 + 0.5) / 3,
            "eval/response_length_mean": 2.0,
            "eval/truncated_share": 2 / 6,
            "eval/failed": 0.0,
            "eval/pass@1_stderr": 0.5 / 3**0.5,  # of 0.5, 1 and 0
            "eval/mean_stderr": ((1 / 12) ** 2 + (5 / 12) ** 2 + (4 / 12) ** 2) ** 0.5 / 6**0.5,  # of 0.5, 1 and 0.25
        }
    )


async def test_what_environments_and_agents_tell_is_averaged() -> None:
    """Over the samples that have it; what the evaluation itself measures keeps its name."""

    def telling(request: EpisodeRequest) -> list[Trajectory]:
        (played,) = cast("list[Trajectory]", play(request))
        own = {"invalid_actions": 4.0} if request.sample_id == 0 else {}
        return [evolve(played, metrics={"turns": 1.0 + request.sample_id, "failed": 7.0, **own})]

    metrics = await evaluate({"a": "x", "b": "x"}, FakeAgentExecutor(telling))
    assert metrics["eval/turns"] == 1 + (0 + 1 + 2 + 3) / 4
    assert metrics["eval/invalid_actions"] == 4.0
    assert metrics["eval/failed"] == 0.0
    assert "eval/pass@1_stderr" not in await evaluate({"a": "x"}, FakeAgentExecutor(telling)), "one prompt has none"


async def test_an_evaluation_that_ends_early_tells_what_was_scored() -> None:
    """Whether episodes fail or it is interrupted: what it has scored by then may have taken hours."""

    def ending(error: BaseException | None) -> Any:
        def end(request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
            if request.prompt.text != "c":
                return play(request)
            if error is not None:
                raise error
            return request.failure(FailureKind.ENVIRONMENT, "the board is gone")

        return end

    for error, raised in ((None, EngineError), (CancelledError(), CancelledError)):
        one_by_one = RolloutService(FakeAgentExecutor(ending(error)), max_concurrent=1, max_failures=0)
        prompts = [Prompt(token_ids=(1,), text=text) for text in SCORES]
        kept = KeptEvaluations()
        params = SamplingParams(temperature=0.0)
        service = EvaluationService(one_by_one, prompts, params, samples=2, threshold=1.0, trajectories=kept)
        with capture_logs() as logs, pytest.raises(raised):
            await service.run(step=3)
        assert kept.prompts == {3: ["a", "b"]}
        told = logs[-1]
        assert (told["event"], told["scored"], told["of"]) == ("the evaluation ended early", 2, 3)
        assert (told["eval/pass@1"], told["eval/mean@2"]) == (0.75, 0.75)


async def test_an_evaluation_that_continues_plays_what_is_missing_and_finds_the_same() -> None:
    """It plays nothing that it knows, and tolerates failures as one that plays all."""

    def some(request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        if request.sample_id in (1, 4):
            return request.failure(FailureKind.ENVIRONMENT, "the board is gone")
        (played,) = cast("list[Trajectory]", play(request))
        return [evolve(played, metrics={"turns": 1.0 + request.sample_id}, answer="7", reward_parts={"right": 0.5})]

    groups: list[RolloutGroup] = []
    sources = {"a": "x", "b": "x", "c": "y"}
    whole = await evaluating(sources, FakeAgentExecutor(some), max_failures=2).run(on_group=groups.append)
    for missing in ({0}, {1, 2}, set[int]()):
        executor = FakeAgentExecutor(some)
        kept = [PromptResult.of(group) for group in groups if group.group_id not in missing]
        assert await evaluating(sources, executor, max_failures=1).run(kept=kept) == whole
        assert {request.group_id for request in executor.requests} == missing


async def test_named_parts_of_the_reward_are_measured_as_in_training() -> None:
    """Each is what it contributes to the mean, its weight included: a sample without a part has nothing of it, and one
    of a sample's branches has them."""

    def parted(request: EpisodeRequest) -> list[Trajectory]:
        (played,) = cast("list[Trajectory]", play(request))
        right = {"right": played.score}
        return [played, evolve(played, reward_parts={**right, "short": 1.0} if request.sample_id % 2 else right)]

    rollout = RolloutService(FakeAgentExecutor(parted), max_concurrent=3)
    prompts = [Prompt(token_ids=(1,), text=text, datasource=source) for text, source in (("a", "x"), ("b", "y"))]
    params = SamplingParams(temperature=0.0)
    weights = {"short": 0.5}
    service = EvaluationService(rollout, prompts, params, samples=2, threshold=1.0, part_weights=weights)
    metrics = await service.run()
    told = {name: value for name, value in metrics.items() if "part/" in name}
    assert told == {
        "eval/part/right": 0.75,
        "eval/part/short": 0.25,
        "eval/x/part/right": 0.5,
        "eval/x/part/short": 0.25,
        "eval/y/part/right": 1.0,
        "eval/y/part/short": 0.25,
    }
    assert "eval/part/right" not in await evaluate({"a": "x"}, FakeAgentExecutor(play))


async def test_the_branches_of_an_episode_count_once() -> None:
    """As in a rollout's metrics: an episode that opens many branches is one, as long as all of them together."""

    def branching(request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        branches = play(request)
        assert isinstance(branches, list)
        return branches * (1 + 3 * (request.sample_id % 2))

    metrics = await evaluate({"a": "x"}, FakeAgentExecutor(branching))
    assert metrics["eval/response_length_mean"] == (1 + 4) / 2
    assert metrics["eval/truncated_share"] == 0.5


async def test_most_samples_decide_what_an_answer_is_worth() -> None:
    """Each of two samples with different answers is half of it; nothing is said where no answer is known."""

    def answering(request: EpisodeRequest) -> list[Trajectory]:
        (played,) = cast("list[Trajectory]", play(request))
        alike = request.prompt.text != "a"
        return [evolve(played, answer="5" if alike else str(request.sample_id))]

    metrics = await evaluate({"a": "x", "b": "y", "c": "y"}, FakeAgentExecutor(answering))
    assert metrics["eval/x/maj@2"] == 0.5
    assert metrics["eval/y/maj@2"] == (1 + 0) / 2
    assert metrics["eval/maj@2"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert not any("maj@" in name for name in await evaluate({"a": "x"}, FakeAgentExecutor(play)))


async def test_the_threshold_decides_what_passes() -> None:
    metrics = await evaluate({"c": "x"}, FakeAgentExecutor(play), threshold=0.5)
    assert metrics["eval/pass@1"] == 0.5
    assert metrics["eval/pass@2"] == 1.0


@pytest.mark.parametrize(("threshold", "warnings"), [(0.6, 1), (0.5, 0), (4.0, 0)])
async def test_replies_that_come_near_and_never_pass_are_told_once(threshold: float, warnings: int) -> None:
    service = evaluating({"c": "x"}, FakeAgentExecutor(play), threshold=threshold)
    with capture_logs() as logs:
        for _ in range(2):
            await service.run()
    assert len(logs) == warnings
    assert all("the highest score is 0.5, and one passes at 0.6" in line["event"] for line in logs)


def test_a_reply_whose_parts_make_a_whole_passes_whatever_rounding_leaves() -> None:
    whole = 0.7 + 0.2 + 0.1
    assert whole < 1.0
    metrics = summarise([[whole, 0.99]], 1.0, [["yes", None]])
    assert (metrics["pass@1"], metrics["pass@2"], metrics["maj@2"]) == (0.5, 1.0, 1.0)
    assert set(metrics) == set(summary_names(2)), "and all are known before there are any"
    assert GroupFilter(score_spread=True).rejection([whole, whole], []) == "too_easy"


async def test_several_sources_are_also_reported_one_by_one() -> None:
    metrics = await evaluate({"a": "gsm", "b": "math", "c": "math"}, FakeAgentExecutor(play))
    assert metrics["eval/gsm/pass@1"] == 0.5
    assert metrics["eval/math/pass@1"] == 0.5
    assert metrics["eval/pass@1"] == pytest.approx(0.5)
    assert metrics["eval/math/mean@2"] == 0.625
    assert metrics["eval/math/pass@1_stderr"] == pytest.approx(0.5)  # of 1 and 0
    assert "eval/gsm/pass@1_stderr" not in metrics, "one prompt has none"


async def test_a_column_of_ids_makes_no_metrics_of_each() -> None:
    def even(request: EpisodeRequest) -> list[Trajectory]:
        prompt = request.prompt.token_ids
        return [make_trajectory(prompt, [7], group_id=request.group_id, sample_id=request.sample_id, rewards=[1.0])]

    for count in (MOST_SETS, MOST_SETS + 1):
        with capture_logs() as logs:
            metrics = await evaluate({f"{n}": f"set-{n}" for n in range(count)}, FakeAgentExecutor(even))
        assert metrics["eval/pass@1"] == 1.0
        assert ("eval/set-0/pass@1" in metrics) == (count == MOST_SETS) == (not logs)
    assert "of 65 datasets, such as 'set-0'" in logs[0]["event"]
    assert logs[0]["event"].endswith(
        "measured together alone. List fewer in --eval.dataset, or name fewer in the column datasource of its rows."
    )
    assert len(metrics) < 10


async def test_a_prompt_whose_samples_all_failed_is_left_out() -> None:
    def failing(request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        if request.prompt.text != "a":
            return play(request)
        return RolloutFailure(kind=FailureKind.REWARD, message="no", group_id=request.group_id, sample_id=0)

    metrics = await evaluate({"a": "x", "b": "x"}, FakeAgentExecutor(failing), max_failures=2)
    assert metrics["eval/pass@1"] == 1.0


async def test_a_source_that_no_reward_applies_to_is_left_out() -> None:
    def undecided(request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        if request.prompt.datasource == "y":
            return request.failure(FailureKind.NOT_APPLICABLE, "nothing to compare with")
        return play(request)

    metrics = await evaluate({"a": "x", "c": "y"}, FakeAgentExecutor(undecided))
    assert metrics["eval/pass@1"] == 0.5
    assert not any(name.startswith("eval/y/") for name in metrics)
    with pytest.raises(RewardError, match="No reply to the 1 held-out prompts has a reward: nothing to compare with"):
        await evaluate({"c": "y"}, FakeAgentExecutor(undecided))


async def test_the_difference_of_two_models_has_the_standard_error_of_paired_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = {"a": "x", "b": "x", "c": "x"}
    second = evaluating(sources, FakeAgentExecutor(play))
    await second.run()
    for prompt, scores in {"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [0.0, 0.0]}.items():
        monkeypatch.setitem(SCORES, prompt, scores)
    first = evaluating(sources, FakeAgentExecutor(play))
    await first.run()
    assert second.latest is not None
    assert first.latest is not None
    assert second.latest.difference(first.latest) == pytest.approx(
        {
            "eval/pass@1_difference": 0.0,  # of -0.5, 0.5 and 0
            "eval/pass@1_difference_stderr": 0.5 / 3**0.5,
            "eval/mean_difference": 1 / 12,  # of -0.5, 0.5 and 0.25
            "eval/mean_difference_stderr": (((7 / 12) ** 2 + (5 / 12) ** 2 + (2 / 12) ** 2) / 2 / 3) ** 0.5,
        }
    )
    others = evaluating({"a": "x", "b": "x"}, FakeAgentExecutor(play))
    await others.run()
    assert others.latest is not None
    assert others.latest.difference(first.latest) == {}
