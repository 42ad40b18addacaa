"""Plays an episode of several turns in an environment.

The sampler's tokens are kept as they are; of what the environment says, only its own text is tokenised, and appended.
Text around a turn (chat template markers) is part of the observation. Each action keeps its own turn's reward.
"""

from collections.abc import Callable

from attrs import evolve

from rollgrad.domain.errors import EngineError, RollgradError
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.environment import Environment
from rollgrad.domain.ports.rollout_engine import RolloutEngine
from rollgrad.domain.rewards import FailureKind, RolloutFailure
from rollgrad.domain.sampling import GenerationRequest, StopReason
from rollgrad.domain.trajectory import Trajectory, TrajectoryBuilder


class MultiTurnExecutor(AgentExecutor):
    """See `AgentExecutor`.

    Args:
        engine: samples each turn, up to `max_new_tokens` of the request.
        codec: decodes actions, encodes observations.
        environment: makes a fresh environment; called once an episode.
        max_turns: turns after which an episode counts as truncated.
    """

    def __init__(
        self, engine: RolloutEngine, codec: ChatCodec, environment: Callable[[], Environment], *, max_turns: int
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._environment = environment
        self._max_turns = max_turns

    async def run(self, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        """See `AgentExecutor.run`; `close` runs however the episode ends."""
        try:
            environment = self._environment()
            try:
                return [await self._play(environment, request)]
            finally:
                await environment.close()
        except EngineError as error:
            return request.failure(FailureKind.INFRASTRUCTURE, str(error))
        except RollgradError:
            raise
        except Exception as error:  # whatever a user's environment raises costs its own episode only
            return request.failure(FailureKind.ENVIRONMENT, f"The environment raised {type(error).__name__}: {error}")

    async def _play(self, environment: Environment, request: EpisodeRequest) -> Trajectory:
        builder = TrajectoryBuilder(request.prompt.token_ids, group_id=request.group_id, sample_id=request.sample_id)
        builder.add_observation(self._codec.encode(await environment.reset(request.prompt)))
        stop_reason, score = StopReason.TURN_LIMIT, None
        for turn in range(self._max_turns):
            # One uniform stream a turn: a seed that repeated would draw every turn alike.
            params = evolve(request.params, seed=(request.params.seed + turn) % 2**63)
            generation = await self._engine.generate(
                GenerationRequest(prompt_token_ids=builder.token_ids, params=params)
            )
            builder.add_action(generation)
            result = await environment.step(self._codec.decode(generation.token_ids), generation)
            builder.set_reward(result.reward)
            score = result.score
            if result.terminated:
                stop_reason = StopReason.ENVIRONMENT
                break
            if result.truncated:
                break
            if generation.stop_reason.truncated:
                stop_reason = generation.stop_reason
                break
            if turn + 1 < self._max_turns:
                builder.add_observation(self._codec.encode(result.observation))
        return builder.build(stop_reason=stop_reason, score=score)
