"""Plays an episode of one reply: prompt in, one action, one reward."""

from attrs import evolve

from rollgrad.application.episodes.judging import judge_request
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.generation import GenerationRequest
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.domain.errors import EngineError, RewardError
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.ports.rollout_engine import RolloutEngine


class SingleTurnExecutor(AgentExecutor):
    """An `AgentExecutor` for single replies. The reply is decoded for the reward alone; the trajectory has its tokens
    as sampled.

    `max_tokens`: of prompt and reply together; None for no limit. A reply that would exceed it is truncated.
    """

    def __init__(
        self, engine: RolloutEngine, codec: ChatCodec, rewards: RewardSource, *, max_tokens: int | None = None
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._rewards = rewards
        self._max_tokens = max_tokens

    async def run(self, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        """Implements `AgentExecutor.run`."""
        prompt, params = request.prompt, request.params
        if self._max_tokens is not None:
            room = self._max_tokens - len(prompt.token_ids)
            if room < 1:
                full = (
                    f"A prompt of {len(prompt.token_ids)} tokens leaves no token for a reply within data.max_len "
                    f"{self._max_tokens}: raise --data.max_len, or leave the prompt out."
                )
                return request.failure(FailureKind.DATA, full)
            params = evolve(params, max_new_tokens=min(params.max_new_tokens, room))
        try:
            with foreign_code(lambda words: EngineError(f"The engine raised {words}")):
                generation = await self._engine.generate(
                    GenerationRequest(prompt_token_ids=prompt.token_ids, params=params, images=prompt.images)
                )
                response = self._codec.decode(generation.token_ids)
        except EngineError as error:
            return request.failure(FailureKind.INFRASTRUCTURE, str(error))
        if not generation.token_ids:
            aborted = f"The engine ended the request ({generation.stop_reason}) before its first token."
            return request.failure(FailureKind.INFRASTRUCTURE, aborted)
        question = judge_request(
            self._codec,
            prompt,
            (*prompt.token_ids, *generation.token_ids),
            opening=len(prompt.token_ids),
            response=response,
            stop_reason=generation.stop_reason,
            step=int(generation.versions[-1]),
            images=prompt.images,
        )
        try:
            with foreign_code(lambda words: RewardError(f"The reward raised {words}")):
                (reward,) = await self._rewards.score([question])
        except RewardError as error:
            return request.unjudged(error)
        builder = TrajectoryBuilder(
            prompt.token_ids, group_id=request.group_id, sample_id=request.sample_id, images=prompt.images
        )
        builder.add_action(generation)
        builder.set_reward(reward.value)
        trajectory = builder.build(
            stop_reason=generation.stop_reason,
            score=reward.score,
            metrics=reward.metrics,
            reward_parts=reward.parts,
            answer=reward.answer,
            feedback=reward.feedback,
        )
        return [trajectory]
