"""Makes trajectories from the results of `execute`.

Invariant: token ids are not changed; a contradiction is a `TrajectoryError` that describes it. Does not own: sampling,
and the cost of a failed episode.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from rollgrad.adapters.openrlhf.answers import metrics, number
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.rewards import Reward
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.domain.errors import TrajectoryError
from rollgrad.domain.ports.agent_executor import EpisodeRequest


@frozen(kw_only=True, eq=False)
class EpisodeSegment:
    """One dict, checked and truncated to the episode's length. `logprobs` None: those of the engine; `reward` None: it
    has none."""

    token_ids: list[int]
    ranges: list[tuple[int, int]]
    logprobs: list[float] | None
    reward: float | None
    score: float | None
    metrics: Mapping[str, float]
    truncated: bool
    parts: Mapping[str, float] = field(factory=dict)


@frozen(kw_only=True, eq=False)
class EngineCall:
    """A request of the agent and what the engine sampled for it."""

    prompt: tuple[int, ...]
    generation: Generation


def read_segments(answer: Any, *, max_length: int) -> list[EpisodeSegment]:
    """Returns one segment for a dict, several of one sample for a list, each truncated to `max_length` tokens.

    Args:
        answer: the result of `execute`.
        max_length: largest number of tokens of a segment.

    Raises:
        TrajectoryError: tokens, ranges and log-probs contradict each other.
    """
    dicts = list(answer) if isinstance(answer, list | tuple) else [answer]
    try:
        segments = [_read(one, max_length) for one in dicts]
    except (TypeError, ValueError) as error:
        if isinstance(error, TrajectoryError):
            raise
        raise TrajectoryError(f"execute() returned something that cannot be read: {error}.") from error
    if not segments:
        raise TrajectoryError("execute() returned an empty list, but an episode has at least one dict.")
    return segments


def rewarded(segments: Sequence[EpisodeSegment], reward: Reward) -> list[EpisodeSegment]:
    """Returns the segments of an episode without a reward of its own, with the `reward` of the run's source on the
    last.
    """
    last = segments[-1]
    given = reward.value if reward.score is None else reward.score
    score = given if last.score is None else last.score
    metrics = {**last.metrics, **reward.metrics}
    return [*segments[:-1], evolve(last, reward=reward.value, score=score, metrics=metrics, parts=reward.parts)]


def to_trajectories(
    segments: Sequence[EpisodeSegment], calls: Sequence[EngineCall], request: EpisodeRequest
) -> list[Trajectory]:
    """Returns one trajectory for each segment of an episode.

    Rewards of several segments add up; the score is the last one given, or else the sum of the rewards. Metrics are
    the episode's: of those of one name the last.

    Args:
        segments: segments of an episode, of which at least one has a reward.
        calls: the engine's calls for the episode, in order.
        request: the episode.

    Raises:
        TrajectoryError: neither the segment nor the engine has log-probs of sampled tokens.
    """
    rewards = [segment.reward for segment in segments if segment.reward is not None]
    score = next((segment.score for segment in reversed(segments) if segment.score is not None), math.fsum(rewards))
    measured = {name: value for segment in segments for name, value in segment.metrics.items()}
    pool = list(calls)
    return [_trajectory(evolve(segment, metrics=measured), calls, pool, request, score) for segment in segments]


def version_of(calls: Sequence[EngineCall]) -> int:
    """Returns the policy version that sampled the latest token; 0 without any."""
    return int(calls[-1].generation.versions[-1]) if calls and calls[-1].generation.versions else 0


def _read(answer: Any, max_length: int) -> EpisodeSegment:
    if not isinstance(answer, Mapping):
        raise TrajectoryError(
            f"execute() returned {type(answer).__name__}, but it must return a dict, or a list of them."
        )
    lacking = [key for key in ("observation_tokens", "action_ranges") if answer.get(key) is None]
    if lacking:
        raise TrajectoryError(f"execute() returned a dict without {' and '.join(map(repr, lacking))}.")
    if answer.get("images") or answer.get("mm_train_inputs"):
        raise TrajectoryError("execute() returned images, which this run cannot show to its model.")
    tokens = [int(token) for token in answer["observation_tokens"]]
    ranges = [(int(start), int(stop)) for start, stop in answer["action_ranges"]]
    _check_ranges(ranges, len(tokens), max_length)
    logprobs = answer.get("rollout_log_probs")
    if logprobs is not None:
        logprobs = [float(value) for value in logprobs]
        if len(logprobs) != len(tokens):
            raise TrajectoryError(
                f"execute() returned {len(logprobs)} rollout_log_probs for {len(tokens)} observation_tokens: each "
                "token needs one, 0.0 where the model did not sample it."
            )
        logprobs = logprobs[:max_length]
    end = min(len(tokens), max_length)
    cut = [(start, min(stop, end)) for start, stop in ranges if start < min(stop, end)]
    reward, score = answer.get("reward"), answer.get("scores")
    return EpisodeSegment(
        token_ids=tokens[:max_length],
        ranges=cut,
        logprobs=logprobs,
        reward=None if reward is None else number(reward, "reward"),
        score=None if score is None else number(score, "scores"),
        metrics=metrics(answer.get("extra_logs")),
        truncated=bool(answer.get("truncated")) or len(tokens) > max_length,
    )


def _check_ranges(ranges: Sequence[tuple[int, int]], length: int, max_length: int) -> None:
    """Checks that ranges are in order, disjoint and inside. A range may end after the tokens of a truncated episode."""
    end = 0
    for start, stop in ranges:
        if not 0 <= start <= stop:
            raise TrajectoryError(
                f"execute() returned the action range ({start}, {stop}): it must be 0 <= start <= stop."
            )
        if start < end:
            raise TrajectoryError(
                f"execute() returned the action range ({start}, {stop}) after one that ends at {end}: ranges must be "
                "sorted and may not overlap."
            )
        if stop > length and length < max_length:
            raise TrajectoryError(
                f"execute() returned the action range ({start}, {stop}), but only {length} observation_tokens."
            )
        end = stop


def _trajectory(
    segment: EpisodeSegment,
    calls: Sequence[EngineCall],
    pool: list[EngineCall],
    request: EpisodeRequest,
    score: float,
) -> Trajectory:
    tokens, version = segment.token_ids, version_of(calls)
    end = segment.ranges[0][0] if segment.ranges else len(tokens)
    builder = TrajectoryBuilder(tokens[:end], group_id=request.group_id, sample_id=request.sample_id)
    for start, stop in segment.ranges:
        builder.add_observation(tokens[end:start])
        call = _sampled(pool, tokens[:start], tokens[start:stop])
        if segment.logprobs is None and call is None:
            raise TrajectoryError(
                f"execute() returned no rollout_log_probs, and the engine never sampled the tokens of the action range "
                f"({start}, {stop}): return token ids as the engine gave them, never encoded again."
            )
        known = call.logprobs[: stop - start] if call is not None else ()
        builder.add_action(
            Generation(
                token_ids=tokens[start:stop],
                logprobs=known if segment.logprobs is None else segment.logprobs[start:stop],
                versions=call.versions[: stop - start] if call is not None else [version] * (stop - start),
                stop_reason=StopReason.STOP,
            )
        )
        end = stop
    builder.add_observation(tokens[end:])
    for made in calls:
        sequence = [*made.prompt, *made.generation.token_ids][: len(tokens)]
        if len(made.prompt) <= len(tokens) and sequence == tokens[: len(sequence)]:
            builder.add_routed(made.generation.routed)  # the call sampled these tokens, at the same places
    if segment.ranges and segment.reward is not None:
        builder.set_reward(segment.reward)
    return builder.build(
        stop_reason=StopReason.LENGTH if segment.truncated else StopReason.ENVIRONMENT,
        score=score,
        metrics=segment.metrics,
        reward_parts=segment.parts,
    )


def _sampled(pool: list[EngineCall], before: Sequence[int], tokens: Sequence[int]) -> Generation | None:
    """Returns the first sample that begins with `tokens`, preferably one whose prompt was `before`; it is then used
    up."""
    found = [call for call in pool if list(call.generation.token_ids[: len(tokens)]) == list(tokens)]
    if not found:
        return None
    chosen = next((call for call in found if list(call.prompt) == list(before)), found[0])
    pool.remove(chosen)
    return chosen.generation
