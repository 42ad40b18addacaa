"""Evaluation of the current policy on fixed prompts."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import fsum
from statistics import fmean

import structlog
from attrs import frozen

from rollgrad.application.rollouts.groups import RolloutGroup, RolloutService
from rollgrad.application.rollouts.metrics import own_metrics
from rollgrad.application.rollouts.results import PromptResult
from rollgrad.application.rollouts.trajectory_log import TrajectoryLog
from rollgrad.domain.algorithms.equality import reaches
from rollgrad.domain.algorithms.evaluation import paired_difference, standard_error, summarise, too_many_sets
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import RewardError

log = structlog.get_logger(__name__)

NEAR = 0.5
"""Share of the score from which replies pass, at which the best reply may be right."""


@frozen
class PromptScores:
    """Scores of an evaluation, by which two models are compared: of the replies to each of the prompts that were
    `asked`, with the score from which a reply passes."""

    asked: Sequence[object]
    scores: Sequence[Sequence[float]]
    threshold: float

    @property
    def errors(self) -> dict[str, float]:
        """Standard errors over the prompts, of `pass@1` and the mean score; none of a single prompt."""
        scored = [scores for scores in self.scores if scores]
        found = {name: standard_error([value(scores) for scores in scored]) for name, value in self._values}
        return {f"{name}_stderr": error for name, error in found.items() if error is not None}

    def difference(self, other: "PromptScores") -> dict[str, float]:
        """Returns by how much these scores are better than `other`, as `eval/pass@1_difference` and
        `eval/mean_difference`, each with its standard error (`..._stderr`); nothing where the prompts differ."""
        metrics: dict[str, float] = {}
        if self.asked != other.asked:
            return metrics
        for name, value in self._values:
            first, second = ([value(of) if of else None for of in each] for each in (other.scores, self.scores))
            compared = paired_difference(first, second)
            if compared is not None:
                whole = f"eval/{name}_difference"
                metrics[whole], metrics[f"{whole}_stderr"] = compared
        return metrics

    @property
    def _values(self) -> tuple[tuple[str, Callable[[Sequence[float]], float]], ...]:
        return ("pass@1", self._pass_share), ("mean", fmean)

    def _pass_share(self, scores: Sequence[float]) -> float:
        return fmean(reaches(score, self.threshold) for score in scores)


class EvaluationService:
    """Samples `samples` replies to each prompt and summarises their scores.

    Args:
        rollout: plays the episodes.
        prompts: held-out prompts.
        params: sampling settings, usually greedy.
        samples: replies per prompt.
        threshold: score from which a reply passes.
        trajectories: keeps the replies of a run's evaluations; None keeps none.
        part_weights: weights of the reward's named parts, which are 1 where they have none.
    """

    def __init__(
        self,
        rollout: RolloutService,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        samples: int,
        threshold: float,
        trajectories: TrajectoryLog | None = None,
        part_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._rollout = rollout
        self._prompts = prompts
        self._params = params
        self._samples = samples
        self._threshold = threshold
        self._trajectories = trajectories
        self._part_weights = part_weights or {}
        self.latest: PromptScores | None = None
        """Scores of the evaluation that ran last."""
        too_many = too_many_sets({prompt.datasource for prompt in prompts})
        if too_many is not None:
            log.warning(too_many)
        self._one_by_one = too_many is None
        self._told_none_passed = False

    async def run(
        self,
        step: int | None = None,
        *,
        on_group: Callable[[RolloutGroup], object] = lambda group: None,
        kept: Sequence[PromptResult] = (),
    ) -> dict[str, float]:
        """Returns the metrics of an evaluation. Prompts without any rewarded reply are left out of them.

        - Scores: `eval/pass@1`, `eval/pass@k` (unbiased), `eval/mean@n`, `eval/best@k`, `eval/maj@n`, and standard
          errors.
        - `eval/part/NAME`: what the named parts of the reward contribute to its mean.
        - `eval/NAME/...`: scores and parts of each data source, if there are several, up to `MOST_SETS`.
        - `eval/failed`: the number of failed episodes; lengths and truncation of the others, and what these tell of
          themselves (`eval/turns`).

        An evaluation that ends early logs the scores until then, and keeps the replies.

        Args:
            step: updates of the run before it; None outside a run.
            on_group: is told the replies to each prompt when they are there.
            kept: results of prompts that an evaluation which ended early has found; they are not played again.

        Raises:
            RewardError, EngineError: too many episodes failed, or no reply has a reward.
        """
        results = await self._play(step, on_group, kept)
        asked = [prompt.messages or prompt.text for prompt in self._prompts]
        self.latest = PromptScores(asked, [result.scores for result in results], self._threshold)
        failures = [failure for result in results for failure in result.failures]
        sources: dict[str, list[PromptResult]] = defaultdict(list)
        for result in results:
            if result.scores:
                sources[result.datasource].append(result)
        if not sources:
            why = failures[-1].message if failures else "there are none"
            raise RewardError(f"No reply to the {len(results)} held-out prompts has a reward: {why}")
        metrics = self._summary("eval", [result for source in sources.values() for result in source])
        if len(sources) > 1 and self._one_by_one:
            for name, source in sources.items():
                metrics |= self._summary(f"eval/{name}", source)
        self._note_none_passed(max(score for result in results for score in result.scores))
        episodes = [episode for result in results for episode in result.episodes]
        metrics["eval/failed"] = float(len(failures))
        metrics["eval/response_length_mean"] = fmean(episode.sampled_tokens for episode in episodes)
        metrics["eval/truncated_share"] = fmean(episode.truncated for episode in episodes)
        return metrics | own_metrics("eval", [episode.metrics for episode in episodes], metrics)

    def _note_none_passed(self, highest: float) -> None:
        """Warns once where no reply passes, though the best comes near: `pass@1` stays 0 if a right reply never quite
        reaches the threshold, as beside a penalty on its length."""
        near = self._threshold * NEAR <= highest and not reaches(highest, self._threshold)
        if near and not self._told_none_passed:
            self._told_none_passed = True
            log.warning(
                f"No held-out reply passes, so that pass@1 is 0: the highest score is {highest:.3g}, and one passes "
                f"at {self._threshold:g}. If one with that score is right, lower --reward.pass_threshold."
            )

    async def _play(
        self, step: int | None, on_group: Callable[[RolloutGroup], object], kept: Sequence[PromptResult]
    ) -> list[PromptResult]:
        """Returns all results in the order of the prompts, and keeps the groups that were played, however it ends."""
        groups: list[RolloutGroup] = []

        def played(group: RolloutGroup) -> None:
            groups.append(group)
            on_group(group)

        def results() -> list[PromptResult]:
            return sorted([*kept, *map(PromptResult.of, groups)], key=lambda result: result.group_id)

        done = {result.group_id for result in kept}
        try:
            if len(done) < len(self._prompts):
                await self._rollout.collect(
                    self._prompts, self._params, samples=self._samples, done=done, on_group=played
                )
            return results()
        except BaseException:  # an interruption, too: what was scored may have taken hours
            if scored := [result for result in results() if result.scores]:
                so_far = self._summary("eval", scored)
                log.warning("the evaluation ended early", scored=len(scored), of=len(self._prompts), **so_far)
            raise
        finally:
            if self._trajectories is not None and step is not None and groups:
                self._trajectories.evaluation(step, sorted(groups, key=lambda group: group.group_id))

    def _summary(self, prefix: str, results: Sequence[PromptResult]) -> dict[str, float]:
        scores = [result.scores for result in results]
        answers = [[episode.answer for episode in result.episodes] for result in results]
        metrics = summarise(scores, self._threshold, answers)
        metrics |= PromptScores((), scores, self._threshold).errors
        episodes = [episode for result in results for episode in result.episodes]
        for name in sorted({name for episode in episodes for name in episode.reward_parts}):
            told = fsum(episode.reward_parts.get(name, 0.0) for episode in episodes)
            metrics[f"part/{name}"] = self._part_weights.get(name, 1.0) * told / len(episodes)
        return {f"{prefix}/{name}": value for name, value in metrics.items()}
