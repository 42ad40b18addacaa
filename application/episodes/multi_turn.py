"""Plays an episode of several turns in an environment, within its limits, by `AgentRuntime`.

Each action keeps the reward of its turn.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from rollgrad.application.episodes.judging import judge_request, judged
from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.application.episodes.runtime import AgentRuntime
from rollgrad.application.episodes.session import AgentSession
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.generation import SamplingParams, StopReason
from rollgrad.domain.episodes.rewards import FailureKind, Reward, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import DataError, EngineError, ForeignError, RewardError, RollgradError
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.environment import Environment, StepResult
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.ports.rollout_engine import RolloutEngine

log = structlog.get_logger(__name__)

EnvironmentFactory = Callable[[SamplingParams], Environment | Awaitable[Environment]]
"""Function that makes a fresh environment for an episode with the given sampling settings."""


CLOSE_SECONDS = 60.0
"""Longest wait for an environment to close: an episode that has been played must not keep its rollout from ending."""


class MultiTurnExecutor(AgentExecutor):
    """An `AgentExecutor` for environments.

    Args:
        engine: samples each turn, up to `max_new_tokens` of the request.
        codec: decodes actions, encodes observations.
        environment: makes a fresh environment; called once an episode.
        max_turns: turns after which an episode counts as truncated.
        max_tokens: tokens of an episode, prompt and observations included; None for no limit.
        max_seconds: wall clock of an episode; None for no limit. Turns finished until then are kept.
        rewards: judges the episodes whose last step has no reward (`StepResult.reward` None).
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
        rewards: RewardSource | None = None,
    ) -> None:
        self._rewards = rewards
        self._said = rewards is None
        self._runtime = AgentRuntime(engine, codec, max_turns=max_turns, max_tokens=max_tokens)
        self._codec = codec
        self._environment = environment
        self._max_tokens = max_tokens
        self._max_seconds = max_seconds

    async def run(self, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        """Implements `AgentExecutor.run`; the environment is closed however the episode ends. One that cannot be
        closed is logged: what was played counts."""
        try:
            with foreign_code(lambda words: ForeignError(f"The environment raised {words}"), located=True):
                made = self._environment(request.params)
                environment = await made if isinstance(made, Awaitable) else made
                try:
                    return await self._play(environment, request)
                finally:
                    await _close(environment)
        except ForeignError as error:  # it fails this episode only
            return request.failure(FailureKind.ENVIRONMENT, str(error))
        except EngineError as error:
            return request.failure(FailureKind.INFRASTRUCTURE, str(error))
        except RewardError as error:
            return request.unjudged(error)
        except DataError as error:
            return request.failure(FailureKind.DATA, str(error))

    async def _play(self, environment: Environment, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        session, ledger = AgentSession(environment), TokenLedger(self._codec)
        stop_reason: StopReason | None = None
        response = ""
        try:
            async with asyncio.timeout(self._max_seconds) as deadline:
                async for turn in self._runtime.play(session, ledger, request.prompt, request.params):
                    stop_reason, response = turn.stop_reason, turn.action.text
        except TimeoutError:
            if not deadline.expired():  # the environment raised this TimeoutError itself
                raise
            stop_reason = StopReason.TIMEOUT
            if not ledger.turns:
                slow = f"No turn was played within {self._max_seconds:g} s (rollout.max_episode_seconds)."
                return request.failure(FailureKind.ENVIRONMENT, slow)
        if not ledger.turns:
            full = (
                "The prompt and what the environment opened with leave no room for a reply in an episode of at most "
                f"{self._max_tokens} tokens (rollout.max_episode_tokens or data.max_len)."
            )
            return request.failure(FailureKind.DATA, full)
        ended = stop_reason or StopReason.LENGTH
        last = session.last
        _check_roles(last, ledger.roles)
        if last.reward is None and not last.rewards:
            reward = await self._judge(session, ledger, request, response, ended)
            ledger.reward_last(reward.value)
            score: float | None = reward.value if reward.score is None else reward.score
        else:
            self._tell_rewarding()
            reward = _own_reward(last)
            score = last.score
        return ledger.trajectories(
            group_id=request.group_id,
            sample_id=request.sample_id,
            stop_reason=ended,
            score=score,
            metrics={
                "turns": float(ledger.turns),
                "branches": float(ledger.branches),
                **last.metrics,
                **reward.metrics,
            },
            reward_parts=reward.parts,
            answer=reward.answer,
            feedback=reward.feedback,
        )

    def _tell_rewarding(self) -> None:
        if not self._said:
            self._said = True
            log.info("the environment rewards its episodes: the run's reward judges only those whose reward is None")

    async def _judge(
        self,
        session: AgentSession,
        ledger: TokenLedger,
        request: EpisodeRequest,
        response: str,
        stop_reason: StopReason,
    ) -> Reward:
        latest = ledger.latest()
        question = judge_request(
            self._codec,
            request.prompt,
            latest.token_ids,
            opening=latest.opening,
            response=response,
            stop_reason=stop_reason,
            step=latest.version,
            completion=session.spoken,
            images=latest.images,
        )
        return await judged(self._rewards, question)


def _own_reward(last: StepResult) -> Reward:
    """Returns what an environment's last step says of the episode, without the metrics of the environment."""
    return Reward(
        value=last.reward or 0.0,
        score=last.score,
        parts=last.reward_parts,
        answer=last.answer,
        feedback=last.feedback,
    )


def _check_roles(last: StepResult, roles: Sequence[str]) -> None:
    """Raises a `ForeignError` if an episode's last step rewards some of the roles that acted, but not all. Within
    an episode a role may be rewarded alone."""
    lacking = [role for role in roles if role not in last.rewards]
    if last.rewards and lacking and (last.terminated or last.truncated):
        given = ", ".join(map(str, last.rewards))
        others = ", ".join(role or "one without a role" for role in lacking)
        raise ForeignError(
            f"The environment's last step has rewards of {given}, but {others} acted, too: return a reward for "
            "each role."
        )


async def _close(environment: Environment) -> None:
    try:
        with foreign_code(lambda words: ForeignError(f"its close raised {words}")):
            async with asyncio.timeout(CLOSE_SECONDS) as deadline:
                await environment.close()
    except RollgradError as error:
        reason = f"it takes more than {CLOSE_SECONDS:g} s" if deadline.expired() else str(error)
        log.warning("environment_not_closed", reason=reason)
