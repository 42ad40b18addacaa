"""Plays an episode of several turns in an environment.

The sampler's tokens are kept as they are; of what the environment says, only its own text is tokenised, and appended.
Text around a turn (chat template markers) is part of the observation. Each action keeps its own turn's reward.
"""

import asyncio
from collections.abc import Callable

from attrs import evolve

from rollgrad.domain.errors import EngineError, RollgradError
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.environment import Environment, StepResult
from rollgrad.domain.ports.rollout_engine import RolloutEngine
from rollgrad.domain.rewards import FailureKind, RolloutFailure
from rollgrad.domain.sampling import GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.trajectory import Trajectory, TrajectoryBuilder

EnvironmentFactory = Callable[[SamplingParams], Environment]
"""Makes a fresh environment for an episode with these sampling settings."""


class MultiTurnExecutor(AgentExecutor):
    """See `AgentExecutor`.

    Args:
        engine: samples each turn, up to `max_new_tokens` of the request.
        codec: decodes actions, encodes observations.
        environment: makes a fresh environment; called once an episode.
        max_turns: turns after which an episode counts as truncated.
        max_tokens: tokens of an episode, prompt and observations included; None for no limit.
        max_seconds: wall clock of an episode; None for no limit. What was played until then is kept.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        codec: ChatCodec,
        environment: EnvironmentFactory,
        *,
        max_turns: int,
        max_tokens: int | None = None,
        max_seconds: float | None = None,
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._environment = environment
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._max_seconds = max_seconds

    async def run(self, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        """See `AgentExecutor.run`; `close` runs however the episode ends."""
        try:
            environment = self._environment(request.params)
            try:
                return await self._play(environment, request)
            finally:
                await environment.close()
        except EngineError as error:
            return request.failure(FailureKind.INFRASTRUCTURE, str(error))
        except RollgradError:
            raise
        except Exception as error:  # whatever a user's environment raises costs its own episode only
            return request.failure(FailureKind.ENVIRONMENT, f"The environment raised {type(error).__name__}: {error}")

    async def _play(self, environment: Environment, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        builder = TrajectoryBuilder(request.prompt.token_ids, group_id=request.group_id, sample_id=request.sample_id)
        answers: list[StepResult] = []
        try:
            async with asyncio.timeout(self._max_seconds) as deadline:
                builder.add_observation(self._codec.encode(await environment.reset(request.prompt)))
                stop_reason = await self._turns(environment, request, builder, answers)
        except TimeoutError:
            if not deadline.expired():  # the environment's own
                raise
            stop_reason = StopReason.TIMEOUT
            if not builder.has_action:
                slow = f"No turn was played within {self._max_seconds:g} s (rollout.max_episode_seconds)."
                return request.failure(FailureKind.ENVIRONMENT, slow)
        if not builder.has_action:
            full = (
                f"The prompt and what the environment opened with have {len(builder.token_ids)} tokens, but an episode "
                f"has at most {self._max_tokens} (rollout.max_episode_tokens)."
            )
            return request.failure(FailureKind.DATA, full)
        last = answers[-1] if answers else StepResult()
        return [builder.build(stop_reason=stop_reason, score=last.score, metrics=last.metrics)]

    async def _turns(
        self, environment: Environment, request: EpisodeRequest, builder: TrajectoryBuilder, answers: list[StepResult]
    ) -> StopReason:
        """Plays to the end, and says why it is the end; what the environment answers goes to `answers`."""
        params = request.params
        for turn in range(self._max_turns):
            room = self._room(builder, params.max_new_tokens)
            if room < 1:
                return StopReason.LENGTH
            # One uniform stream a turn: a seed that repeated would draw every turn alike.
            seeded = evolve(params, seed=(request.params.seed + turn) % 2**63, max_new_tokens=room)
            generation = await self._engine.generate(
                GenerationRequest(prompt_token_ids=builder.token_ids, params=seeded)
            )
            builder.add_action(generation)
            answer = await environment.step(self._codec.decode(generation.token_ids), generation)
            answers.append(answer)
            builder.set_reward(answer.reward)
            if answer.terminated:
                return StopReason.ENVIRONMENT
            if answer.truncated:
                return StopReason.TURN_LIMIT
            if generation.stop_reason.truncated:
                return generation.stop_reason
            params = answer.sampling or params
            if turn + 1 < self._max_turns:
                observation = self._codec.encode(answer.observation)
                if self._room(builder, len(observation) + 1) <= len(observation):
                    return StopReason.LENGTH
                builder.add_observation(observation)
        return StopReason.TURN_LIMIT

    def _room(self, builder: TrajectoryBuilder, wanted: int) -> int:
        """How many of `wanted` more tokens the episode may have."""
        return wanted if self._max_tokens is None else min(wanted, self._max_tokens - len(builder.token_ids))
