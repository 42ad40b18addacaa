"""An `AgentExecutor` that plays scripted episodes, and trajectories to order."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.rewards import RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest


def make_trajectory(
    prompt: Sequence[int],
    *turns: Sequence[int],
    group_id: int = 0,
    sample_id: int = 0,
    rewards: Sequence[float] = (),
    logprob: float = -1.0,
    version: int = 0,
    stop_reason: StopReason = StopReason.STOP,
    metrics: Mapping[str, float] | None = None,
    reward_parts: Mapping[str, float] | None = None,
) -> Trajectory:
    """A trajectory of `prompt`, then action, observation, action, ...; `rewards` belong to the actions in order."""
    builder = TrajectoryBuilder(prompt, group_id=group_id, sample_id=sample_id)
    given = list(rewards)
    for index, turn in enumerate(turns):
        if index % 2:
            builder.add_observation(turn)
            continue
        count = len(turn)
        builder.add_action(
            Generation(
                token_ids=list(turn),
                logprobs=[logprob] * count,
                versions=[version] * count,
                stop_reason=StopReason.STOP,
            )
        )
        if given:
            builder.set_reward(given.pop(0))
    return builder.build(stop_reason=stop_reason, metrics=metrics, reward_parts=reward_parts)


def reply_with_sample_id(request: EpisodeRequest) -> list[Trajectory]:
    """One action token, the sample id; its reward is the sample id too."""
    return [
        make_trajectory(
            request.prompt.token_ids,
            [request.sample_id],
            group_id=request.group_id,
            sample_id=request.sample_id,
            rewards=[float(request.sample_id)],
        )
    ]


class FakeAgentExecutor(AgentExecutor):
    """Answers with `play(request)` after `delay(request)` turns of the event loop; keeps requests and the most that
    were in flight."""

    def __init__(
        self,
        play: Callable[[EpisodeRequest], list[Trajectory] | RolloutFailure] = reply_with_sample_id,
        *,
        delay: Callable[[EpisodeRequest], int] = lambda request: 1,
    ) -> None:
        self._play = play
        self._delay = delay
        self.requests: list[EpisodeRequest] = []
        self.in_flight = 0
        self.peak = 0

    async def run(self, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        """Keeps the request, waits, and returns or raises what `play` does."""
        self.requests.append(request)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            for _ in range(self._delay(request)):
                await asyncio.sleep(0)
            return self._play(request)
        finally:
            self.in_flight -= 1
