"""Port: plays one episode."""

from typing import Protocol, runtime_checkable

from attrs import frozen

from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import NotApplicableError, RewardError


@frozen(kw_only=True)
class EpisodeRequest:
    """One episode to play: sample `sample_id` of the group `group_id`, which shares `prompt`."""

    prompt: Prompt
    params: SamplingParams
    group_id: int
    sample_id: int

    def failure(self, kind: FailureKind, message: str) -> RolloutFailure:
        """Returns the failure of this episode."""
        return RolloutFailure(kind=kind, message=message, group_id=self.group_id, sample_id=self.sample_id)

    def unjudged(self, error: RewardError) -> RolloutFailure:
        """Returns the failure of this episode, which got no reward because of `error`."""
        applies = not isinstance(error, NotApplicableError)
        return self.failure(FailureKind.REWARD if applies else FailureKind.NOT_APPLICABLE, str(error))


@runtime_checkable
class AgentExecutor(Protocol):
    """Plays episodes. Promises: tokens of the trajectory are those that the engine was given and sampled, never encoded
    again; a failure of the episode is returned as a `RolloutFailure`, while a misconfiguration raises."""

    async def run(self, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        """Plays the episode. It returns several trajectories of one sample if the history was rewritten on the way."""
        ...
