"""Rewards from a reward model: in this process, whole in each of several others that share the work, or divided.

Invariants: a copy of the model scores one batch at a time, off the event loop; replies that arrive together, or while
all copies are busy, are scored together. Does not own: the model
(`adapters.models.torch.rewards.reward_model`) and its place.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, evolve, field, frozen

from rollgrad.adapters.rewards.answers import RewardParser, replies
from rollgrad.adapters.system.daemon_thread import in_daemon_thread
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.rewards import Reward, RewardInput, RewardRequest
from rollgrad.domain.errors import RewardError, RollgradError
from rollgrad.domain.ports.reward_source import RewardSource

BATCH_REPLIES = 64
"""Largest number of replies that a process scores together: enough to fill a forward pass, few enough for a common
deadline."""
LINGER = 0.005
"""Seconds that the first reply of a batch waits for others."""

Judge = Callable[[Sequence[RewardInput]], Sequence[tuple[float, bool] | tuple[float, bool, tuple[float, ...]]]]
"""A copy of the model: a blocking function that returns, for each reply in order, its score, whether the model read
only a part of it, and, of a process reward model, the probabilities of its steps."""


@define(eq=False)
class _Copy:
    judge: Judge
    slot: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(1))
    """Held as long as the call lasts, even after its deadline."""


@frozen(eq=False)
class _Job:
    reply: RewardInput
    answer: "asyncio.Future[Reward]"


class ModelReward(RewardSource):
    """Scores prompt and reply together with copies of a reward model.

    A reply of which the model reads only a part counts in the metric `query_truncated`.

    Args:
        copies: copies of the model, at least one; each is called by one thread at a time.
        timeout: seconds that a copy may take for a batch.
        width: processes that divide a copy, and the replies of its batches.
    """

    def __init__(self, copies: Sequence[Judge], *, timeout: float, width: int = 1) -> None:
        self.timeout = timeout
        """Seconds that a copy may take for a batch."""
        self._most = BATCH_REPLIES * width
        self._parser = RewardParser("The reward model")
        self._waiting: deque[_Job] = deque()
        self._idle = [_Copy(judge) for judge in copies]
        self._tasks: set[asyncio.Task[None]] = set()
        self._scoring = 0

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Returns one reward for each request, in order.

        Raises:
            RewardError: the model failed, gave a number that is not finite, or did not answer in time.
        """
        loop = asyncio.get_running_loop()
        jobs = [_Job(_input(request), loop.create_future()) for request in requests]
        self._waiting += jobs
        for _ in range(min(len(self._idle), len(jobs))):
            task = loop.create_task(self._work(self._idle.pop()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return list(await asyncio.gather(*(job.answer for job in jobs)))

    async def _work(self, copy: _Copy) -> None:
        """Lets a copy score batches until no reply waits."""
        try:
            await asyncio.sleep(LINGER)
            while self._waiting:
                free = len(self._tasks) - self._scoring  # the free copies, this one included, share the waiting replies
                count = min(math.ceil(len(self._waiting) / free), self._most)
                batch = [self._waiting.popleft() for _ in range(count)]
                if wanted := [job for job in batch if not job.answer.done()]:
                    await self._settle(copy, wanted)
        except BaseException:  # a cancellation or a defect: without this, waiting replies would be lost
            while self._waiting:
                self._waiting.popleft().answer.cancel()
            raise
        finally:
            self._idle.append(copy)

    async def _settle(self, copy: _Copy, jobs: Sequence[_Job]) -> None:
        """Gives every reply of a batch its reward, or the error instead of it."""
        replies_to_score = [job.reply for job in jobs]
        self._scoring += 1
        try:
            async with asyncio.timeout(self.timeout):
                with foreign_code(lambda words: RewardError(f"The reward model raised {words}")):
                    judged = await in_daemon_thread(lambda: copy.judge(replies_to_score), "reward-model", copy.slot)
                    rewards: list[Reward | RewardError] = [
                        self._reward(*verdict) for _, verdict in zip(jobs, judged, strict=True)
                    ]
        except TimeoutError:
            rewards = [self._timeout_error(len(jobs))] * len(jobs)
        except RollgradError as error:
            rewards = [error if isinstance(error, RewardError) else RewardError(str(error))] * len(jobs)
        except BaseException:  # a cancellation
            for job in jobs:
                job.answer.cancel()
            raise
        finally:
            self._scoring -= 1
        for job, reward in zip(jobs, rewards, strict=True):
            if job.answer.done():  # the caller was cancelled
                continue
            if isinstance(reward, RewardError):
                job.answer.set_exception(reward)
            else:
                job.answer.set_result(reward)

    def _reward(self, value: float, truncated: bool, steps: tuple[float, ...] = ()) -> Reward | RewardError:
        """Returns the reward of one reply, or an error if its number is not finite; the rest of the batch is not
        affected."""
        try:
            (reward,) = self._parser.parse({"rewards": value, "extra_logs": {"query_truncated": float(truncated)}}, 1)
            return evolve(reward, steps=steps)
        except RewardError as error:
            return error

    def _timeout_error(self, count: int) -> RewardError:
        return RewardError(
            f"The reward model did not score {replies(count)} within {self.timeout:g} s: raise --reward.timeout."
        )


def _input(request: RewardRequest) -> RewardInput:
    return RewardInput(text=request.query, token_ids=request.token_ids, reply=request.response, images=request.images)
