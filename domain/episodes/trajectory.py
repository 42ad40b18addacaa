"""The value that joins execution and learning: one token-level episode.

Invariants, checked by `TrajectoryBuilder`, the only way to make a `Trajectory`: segments tile the tokens in order, and
the first is a PROMPT. Only ACTION tokens were sampled, and each has a finite log-prob and a policy version. Every
action segment has its own reward, which is never summed before the estimator.
Does not own: the making of tokens (engines, codecs), nor learning from them (estimators, losses).
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.images import PlacedImages, check_places
from rollgrad.domain.episodes.routed import RoutedTokens, experts_of
from rollgrad.domain.episodes.top_logprobs import TopLogprobs, end_to_end, unsaid
from rollgrad.domain.errors import TrajectoryError

NO_VERSION = -1
"""Policy version recorded on tokens that no policy sampled."""


class SegmentKind(StrEnum):
    """Author of a segment's tokens."""

    PROMPT = "prompt"
    """Given at the start of the episode."""
    ACTION = "action"
    """Sampled by the policy: the only tokens that carry loss."""
    OBSERVATION = "observation"
    """Written by the environment; transparent to discounting."""


@frozen(kw_only=True)
class Segment:
    """Tokens `start` to `stop` (half-open) of a trajectory."""

    kind: SegmentKind
    start: int
    stop: int
    reward: float = 0.0
    """Set on ACTION segments alone."""
    turn: int | None = None
    """Number of the action among those of the whole rollout, over all its branches, in the order of sampling. None:
    this action follows the one before it, in this branch or at the end of the branch before."""
    grammar: str | None = None
    """Grammar that the action was sampled under (`SamplingParams`): its log-probs are of the tokens that the grammar
    allows."""
    state: int | None = None
    """Equal for the actions of a group that were chosen in the same state of their worlds; None if unknown."""


@frozen(kw_only=True, eq=False)
class Trajectory:
    """One episode, or one branch of it, token by token. Made by `TrajectoryBuilder`."""

    token_ids_T: Tensor
    """Int64."""
    logprobs_T: Tensor
    """Float32: log-probs under the sampling distribution, 0 outside actions."""
    versions_T: Tensor
    """Int32: version of the policy that sampled each action token; `NO_VERSION` outside actions."""
    segments: tuple[Segment, ...]
    score: float
    """Outcome, for filtering and evaluation."""
    stop_reason: StopReason
    group_id: int
    """Shared by the samples of one prompt."""
    sample_id: int
    """Shared by the branches of one rollout."""
    metrics: Mapping[str, float] = field(factory=dict)
    images: PlacedImages = ()
    """Images that some of the tokens stand for; none of these was sampled."""
    reward_parts: Mapping[str, float] = field(factory=dict)
    """Named rewards, if the reward is their weighted sum."""
    experts_TLK: Tensor | None = None
    """Experts of a mixture that the engine sent the tokens to (`routed.py`); None where it did not report them."""
    top_logprobs: TopLogprobs | None = None
    """The most likely tokens at the place of each sampled token, in order; None where no engine was asked."""
    answer: str | None = None
    """As in the `Reward` of the episode."""
    feedback: str | None = None
    """As in the `Reward` of the episode."""
    role: str = ""
    """Which of several players of the episode sampled the actions, such as a side of a game: each is compared with the
    same role of other episodes alone. Empty where an episode has one player."""

    @property
    def reward(self) -> float:
        """Sum of the per-turn rewards."""
        return math.fsum(s.reward for s in self.segments)

    @property
    def prompt_length(self) -> int:
        """Number of tokens in the leading PROMPT segment."""
        return self.segments[0].stop

    @property
    def action_length(self) -> int:
        """Number of sampled tokens; environment tokens do not count."""
        return sum(s.stop - s.start for s in self.segments if s.kind is SegmentKind.ACTION)

    @property
    def prescribed(self) -> tuple[Segment, ...]:
        """The actions that were sampled under a grammar."""
        return tuple(segment for segment in self.segments if segment.grammar is not None)

    def __len__(self) -> int:
        return len(self.token_ids_T)


class TrajectoryBuilder:
    """Collects an episode's tokens in the order in which they arise.

    >>> from rollgrad.domain.episodes.generation import Generation, StopReason
    >>> builder = TrajectoryBuilder([5, 6], group_id=0, sample_id=0)
    >>> builder.add_action(Generation(token_ids=[7], logprobs=[-0.1], versions=[3], stop_reason=StopReason.STOP))
    >>> builder.set_reward(1.0)
    >>> builder.build(stop_reason=StopReason.STOP).token_ids_T.tolist()
    [5, 6, 7]
    """

    def __init__(
        self, prompt_token_ids: Sequence[int], *, group_id: int, sample_id: int, images: PlacedImages = ()
    ) -> None:
        if not prompt_token_ids:
            raise TrajectoryError("The prompt has no tokens: every trajectory starts from at least one.")
        self._tokens: list[int] = list(prompt_token_ids)
        self._logprobs: list[float] = [0.0] * len(self._tokens)
        self._versions: list[int] = [NO_VERSION] * len(self._tokens)
        self._segments = [Segment(kind=SegmentKind.PROMPT, start=0, stop=len(self._tokens))]
        self._group_id = group_id
        self._sample_id = sample_id
        self._images = images
        self._routed: list[RoutedTokens] = []
        self._top_logprobs: list[TopLogprobs] = []

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, which are the engine's next input."""
        return tuple(self._tokens)

    @property
    def has_action(self) -> bool:
        """Whether anything has been sampled."""
        return any(segment.kind is SegmentKind.ACTION for segment in self._segments)

    def add_action(self, generation: Generation, *, turn: int | None = None, state: int | None = None) -> None:
        """Appends the engine's tokens as action `turn` of the rollout (as `Segment` numbers them), chosen in `state`.

        Raises:
            TrajectoryError: nothing was sampled, lengths differ, or a log-prob is not a finite number <= 0.
        """
        tokens, logprobs, versions = generation.token_ids, generation.logprobs, generation.versions
        if not len(tokens) == len(logprobs) == len(versions):
            raise TrajectoryError(
                f"The engine returned {len(tokens)} tokens, {len(logprobs)} log-probs and {len(versions)} versions: "
                "each sampled token needs one of each."
            )
        if not tokens:
            raise TrajectoryError("The engine returned no tokens: an action holds at least one.")
        top_logprobs = generation.top_logprobs
        if top_logprobs and len(top_logprobs) != len(tokens):
            raise TrajectoryError(
                f"The engine returned {len(tokens)} tokens, and the likeliest ones at {len(top_logprobs)} places: give "
                "them at each place or at none."
            )
        for position, value in enumerate(logprobs):
            if not (math.isfinite(value) and value <= LOGPROB_SLACK):
                raise TrajectoryError(f"Sampled token {position} has log-prob {value}: it must be finite and <= 0.")
        self.add_routed(generation.routed)
        self._top_logprobs.append(TopLogprobs.of(top_logprobs) if top_logprobs else unsaid(len(tokens)))
        self._append(SegmentKind.ACTION, tokens, logprobs, versions)
        self._segments[-1] = evolve(self._segments[-1], turn=turn, grammar=generation.grammar, state=state)

    def add_routed(self, routed: Sequence[RoutedTokens]) -> None:
        """Records the experts that tokens of the episode were sent to; those that were recorded earlier stay."""
        self._routed.extend(routed)

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Appends the environment's tokens; an empty observation is allowed and adds no segment."""
        if token_ids:
            self._append(SegmentKind.OBSERVATION, token_ids, [0.0] * len(token_ids), [NO_VERSION] * len(token_ids))

    def set_reward(self, reward: float) -> None:
        """Sets the reward of the latest action segment, replacing an earlier one.

        Raises:
            TrajectoryError: no action yet, or the reward is not finite.
        """
        if not math.isfinite(reward):
            raise TrajectoryError(f"The reward is {reward}: it must be a finite number.")
        for index in range(len(self._segments) - 1, -1, -1):
            if self._segments[index].kind is SegmentKind.ACTION:
                self._segments[index] = evolve(self._segments[index], reward=float(reward))
                return
        raise TrajectoryError("A reward was given before any action was sampled.")

    def build(
        self,
        *,
        stop_reason: StopReason,
        score: float | None = None,
        metrics: Mapping[str, float] | None = None,
        reward_parts: Mapping[str, float] | None = None,
        answer: str | None = None,
        feedback: str | None = None,
        role: str = "",
    ) -> Trajectory:
        """Returns the finished trajectory; `score` defaults to the sum of rewards.

        Raises:
            TrajectoryError: no action was sampled, the score is not finite, or an image does not stand in context.
        """
        if not self.has_action:
            raise TrajectoryError("The episode has no sampled token: there is nothing to learn from.")
        outcome = math.fsum(s.reward for s in self._segments) if score is None else float(score)
        if not math.isfinite(outcome):
            raise TrajectoryError(f"The score is {outcome}: it must be a finite number.")
        check_places(self._images, len(self._tokens))
        told = end_to_end(self._top_logprobs)
        return Trajectory(
            token_ids_T=torch.tensor(self._tokens, dtype=torch.int64),
            logprobs_T=torch.tensor(self._logprobs, dtype=torch.float32),
            versions_T=torch.tensor(self._versions, dtype=torch.int32),
            segments=tuple(self._segments),
            score=outcome,
            stop_reason=stop_reason,
            group_id=self._group_id,
            sample_id=self._sample_id,
            metrics=dict(metrics or {}),
            images=self._images,
            reward_parts=dict(reward_parts or {}),
            experts_TLK=experts_of(self._routed, len(self._tokens)),
            top_logprobs=told if told.ids_RK.shape[1] else None,
            answer=answer,
            feedback=feedback,
            role=role,
        )

    def _append(
        self, kind: SegmentKind, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        start = len(self._tokens)
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)
        self._segments.append(Segment(kind=kind, start=start, stop=len(self._tokens)))


LOGPROB_SLACK = 1e-4
"""Rounding allowance above 0 for a log-prob computed in float32."""
