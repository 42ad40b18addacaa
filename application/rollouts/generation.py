"""Sampling and scoring of many replies, in order, for files that a later call continues.

Invariants: results come in the order of the work, whatever finishes first; a reply depends on its row, its sample and
the seed alone. Does not own: files, nor learning.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from attrs import evolve

from rollgrad.application.foreign import foreign_code
from rollgrad.application.rollouts.groups import sample_seed
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.replies import Reply, UnsampledReply, reply_number
from rollgrad.domain.episodes.rewards import Reward, RewardRequest, RolloutFailure
from rollgrad.domain.errors import NotApplicableError, RewardError
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.reward_source import RewardSource

Result = TypeVar("Result")


async def in_order(work: Iterator[Coroutine[Any, Any, Result]], *, at_once: int) -> AsyncIterator[Result]:
    """Does `work`, `at_once` at a time, and yields the results in its order.

    Raises:
        Exception: one of them failed; the results before it were yielded.
    """
    waiting: deque[asyncio.Task[Result]] = deque()
    try:
        while True:
            while len(waiting) < at_once and (coroutine := next(work, None)) is not None:
                waiting.append(asyncio.create_task(coroutine))
            if not waiting:
                return
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


class GenerationService:
    """Samples single replies.

    Args:
        executor: plays one episode of one reply.
        codec: decodes replies.
        params: sampling settings.
        seed: run seed, from which the seed of each reply is computed.
        at_once: replies in flight at once.
    """

    def __init__(
        self, executor: AgentExecutor, codec: ChatCodec, params: SamplingParams, *, seed: int, at_once: int
    ) -> None:
        self._executor = executor
        self._codec = codec
        self._params = params
        self._seed = seed
        self._at_once = at_once

    def stream(self, wanted: Iterable[tuple[int, int, Prompt]]) -> AsyncIterator[Reply | UnsampledReply]:
        """Yields the replies to `wanted` (row, sample, prompt), in this order."""
        return in_order((self._sample(*one) for one in wanted), at_once=self._at_once)

    async def _sample(self, row: int, sample: int, prompt: Prompt) -> Reply | UnsampledReply:
        seed = sample_seed(self._seed, reply_number(row, sample))
        request = EpisodeRequest(prompt=prompt, params=evolve(self._params, seed=seed), group_id=row, sample_id=sample)
        played = await self._executor.run(request)
        if isinstance(played, RolloutFailure):
            return UnsampledReply(prompt=prompt, seed=seed, failure=played)
        (trajectory,) = played
        token_ids = tuple(trajectory.token_ids_T[trajectory.prompt_length :].tolist())
        return Reply(
            row=row,
            sample=sample,
            prompt=prompt,
            completion=self._codec.decode(token_ids),
            token_ids=token_ids,
            logprobs=tuple(trajectory.logprobs_T[trajectory.prompt_length :].tolist()),
            stop_reason=trajectory.stop_reason,
            seed=seed,
        )


def scores(
    rewards: RewardSource, requests: Iterable[RewardRequest], *, at_once: int
) -> AsyncIterator[Reward | RewardError | None]:
    """Yields the rewards of `requests`, in their order: None for a reply to which the reward does not apply, the error
    for one that could not be judged.

    Raises:
        ConfigurationError: no reply could ever be judged.
    """

    async def one(request: RewardRequest) -> Reward | RewardError | None:
        try:
            with foreign_code(lambda words: RewardError(f"The reward raised {words}")):
                (reward,) = await rewards.score([request])
        except NotApplicableError:
            return None
        except RewardError as error:
            return error
        return reward

    return in_order((one(request) for request in requests), at_once=at_once)
