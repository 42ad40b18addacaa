"""Plays episodes of unchanged agents, which are clients of the run's own server.

The session's ledger has the exact tokens of every call. The agent's conversation may branch (sub-agents, rewritten
histories); its outcome is one reward, on the last reply, or one for each of its roles, on the last reply of each.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from attrs import evolve

from rollgrad.application.episodes.chat_request import SessionLimits
from rollgrad.application.episodes.chat_service import ChatService, RecordedSession
from rollgrad.application.episodes.judging import answer_request, judge_request, judged
from rollgrad.application.episodes.numbers import returned_number, returned_numbers
from rollgrad.application.foreign import error_text, foreign_code, shown
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, Reward, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError, ForeignError, RewardError, RollgradError
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest
from rollgrad.domain.ports.agent_program import AgentProgram, AgentResult, AgentTask
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.reward_source import RewardSource


class ServedAgentExecutor(AgentExecutor):
    """An `AgentExecutor` that serves an agent.

    Args:
        program: the agent.
        service: answers its calls.
        codec: decodes replies for the reward.
        url: starts the server if necessary, and returns its address.
        rewards: judges the answers of programs without a reward; None if there is none.
        model: the name under which the policy is served.
        limits: limits of an episode.
        max_seconds: wall clock of an episode; None for no limit. An episode that exceeds it has reward 0.
    """

    def __init__(
        self,
        program: AgentProgram,
        service: ChatService,
        codec: ChatCodec,
        url: Callable[[], Awaitable[str]],
        rewards: RewardSource | None,
        *,
        model: str,
        limits: SessionLimits,
        max_seconds: float | None = None,
    ) -> None:
        self._program = program
        self._service = service
        self._codec = codec
        self._url = url
        self._rewards = rewards
        self._model = model
        self._limits = limits
        self._max_seconds = max_seconds

    async def run(self, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        """Implements `AgentExecutor.run`."""
        url = await self._url()
        session = self._service.open(request.params, self._limits)
        task = AgentTask(
            prompt=_for_clients(request.prompt),
            root_url=f"{url}/s/{session.key}",
            api_key=session.key,
            model=self._model,
            unlearned_key=session.unlearned.key,
        )
        stop_reason, result = StopReason.ENVIRONMENT, AgentResult(reward=0.0)
        try:
            async with asyncio.timeout(self._max_seconds):
                with foreign_code(lambda words: ForeignError(f"The agent raised {words}")):
                    result = _checked(await self._program.run(task))
        except TimeoutError:
            stop_reason = StopReason.TIMEOUT
        except ConfigurationError:
            raise  # every episode would fail in the same way
        except RollgradError as error:  # it fails this episode only
            if session.stopped is None:
                words = str(error) if isinstance(error, ForeignError) else f"The agent raised {error_text(error)}"
                return request.failure(FailureKind.ENVIRONMENT, words)
        finally:
            await session.seal()
        if session.ledger.is_empty:
            message = f"The agent ended its episode without a reply{self._why_none(session, stop_reason)}"
            return request.failure(FailureKind.ENVIRONMENT, message)
        if wrong := _unrewarded(session.ledger.roles, result):
            return request.failure(FailureKind.ENVIRONMENT, wrong)
        try:
            reward = await self._judge(session, request, result)
        except RewardError as error:
            return request.unjudged(error)
        except (EngineError, DataError) as error:
            return request.failure(FailureKind.INFRASTRUCTURE, str(error))
        return _trajectories(session, request, result, reward, stop_reason)

    def _why_none(self, session: RecordedSession, stop_reason: StopReason) -> str:
        """Returns the end of a sentence about an agent that got no reply: why."""
        if session.refused:
            refused = ", ".join(f"{count} {kind}" for kind, count in session.refused.items())
            return f" (its requests were refused: {refused}). {session.refusal}"
        if stop_reason is StopReason.TIMEOUT:
            return f": its {self._max_seconds:g} s were over (--rollout.max_episode_seconds)."
        if session.asked:
            return (
                f" that came to its end (it asked for {session.asked}, and left them, or they failed): read a stream "
                "to its end, or end a reply early with `stop`."
            )
        return " (it did not ask for one)."

    async def _judge(self, session: RecordedSession, request: EpisodeRequest, result: AgentResult) -> Reward:
        if result.reward is not None or result.rewards:
            return Reward(value=result.reward or 0.0)
        latest = session.ledger.latest()
        if result.answer is not None:
            question = answer_request(self._codec, request.prompt, result.answer, step=latest.version)
        else:
            question = judge_request(
                self._codec,
                request.prompt,
                latest.token_ids,
                opening=latest.opening,
                response=str(latest.message["content"]),
                stop_reason=latest.stop_reason,
                step=latest.version,
                images=latest.images,
            )
        return await judged(self._rewards, question)


def _trajectories(
    session: RecordedSession, request: EpisodeRequest, result: AgentResult, reward: Reward, stop_reason: StopReason
) -> list[Trajectory]:
    """Returns the trajectories of a session with their rewards; of several roles each has its own."""
    ledger = session.ledger
    for role in ledger.roles:
        ledger.reward_last(result.rewards.get(role, reward.value), role)
    answered = result.answer is not None or result.reward is not None or bool(result.rewards)
    if not answered and ledger.latest().stop_reason.truncated:  # the last reply is the answer, and was cut off
        stop_reason = ledger.latest().stop_reason
    return ledger.trajectories(
        group_id=request.group_id,
        sample_id=request.sample_id,
        stop_reason=session.stopped or stop_reason,
        score=reward.score,
        metrics={
            "turns": float(ledger.turns - ledger.dropped),
            **({"dropped_turns": float(ledger.dropped)} if ledger.dropped else {}),
            "branches": float(ledger.branches),
            **({"unlearned_turns": float(session.unlearned.count)} if session.unlearned.count else {}),
            **result.metrics,
            **reward.metrics,
        },
        reward_parts=reward.parts,
        answer=reward.answer,
        feedback=reward.feedback,
    )


def _checked(result: Any) -> AgentResult:
    """Returns what a program returned, with Python's numbers.

    Raises:
        ForeignError: it is something else, or cannot be learned from.
    """
    if not isinstance(result, AgentResult):
        raise ForeignError(f"The agent returned {shown(result)}, but a program returns an AgentResult.")
    return evolve(
        result,
        reward=None if result.reward is None else returned_number("The agent", "reward", result.reward),
        metrics=returned_numbers("The agent", "metrics", "metric", result.metrics),
        rewards=returned_numbers("The agent", "rewards", "reward of the role", result.rewards),
    )


def _unrewarded(roles: Sequence[str], result: AgentResult) -> str | None:
    """Returns what is wrong with rewards of roles, of which some have replied that none is for; None if nothing is."""
    lacking = [role for role in roles if role not in result.rewards]
    if not result.rewards or not lacking:
        return None
    given = ", ".join(sorted(result.rewards))
    if "" in lacking:
        return (
            f"The agent returned rewards of the roles {given}, but also asked for replies with task.api_key, which are "
            "no role's: give each client the key of its role (task.role_key)."
        )
    return (
        f"The agent returned rewards of the roles {given}, but {', '.join(lacking)} replied, too: return a reward for "
        "each role."
    )


def _for_clients(prompt: Prompt) -> Prompt:
    """Returns a prompt whose messages have images as OpenAI's clients send them."""
    if not prompt.images:
        return prompt
    images = iter(prompt.images)

    def sent(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
            return part
        return {"type": "image_url", "image_url": {"url": next(images).image.data_uri}}

    return evolve(
        prompt,
        messages=tuple(
            {**message, "content": [*map(sent, message["content"])]}
            if isinstance(message.get("content"), list)  # one with calls may have none
            else message
            for message in prompt.messages
        ),
    )
