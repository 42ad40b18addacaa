"""`ToolEnvironment`: a conversation in which the model may call tools until it answers.

A reply with calls gets their results; a reply without calls is the answer, and so is the result of a tool that
terminates. The model is told of its mistakes (a call that cannot be read, an unknown tool, bad arguments); they are
counted, and never end the episode by themselves.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from attrs import evolve

from rollgrad.application.episodes.session import check_result
from rollgrad.application.foreign import error_text, foreign_code
from rollgrad.domain.algorithms.equality import reaches
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.messages import (
    RESULT_CHARACTERS,
    Action,
    Message,
    ToolCall,
    ToolResult,
    tool_message,
    with_system,
)
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.errors import EngineError, ForeignError, ImageError, RollgradError
from rollgrad.domain.ports.environment import Environment, StepResult, Tool, tool_for_episode
from rollgrad.domain.ports.reward_source import RewardSource

WRONG = "That is not right. Try again."
"""Message to the model after a wrong answer, if it may give another."""

log = structlog.get_logger(__name__)


class ToolEnvironment(Environment):
    """Plays one episode with `tools`.

    Args:
        tools: tools of the model; their owner closes them. Of those that keep something (`KeepsEpisodes`) the
            environment has its own, which `close` closes. A subclass whose tools depend on the prompt sets `self.tools`
            in `reset`.
        rewards: judges the answer (`reward_hook`); None leaves it to the run's reward.
        system_prompt: put before the conversation, unless it has one.
        attempts: answers that the model may give. If an answer before the last scores below `pass_threshold`, its
            reward is 0 and the model is told that it is wrong.
        pass_threshold: score from which an answer is right.
        end_of_turn: text that ends a reply, added to the answer for reward models (`ChatCodec.end_of_turn`).
        read_image: returns the file of an image of a tool's answer (path, data URI or bytes), or raises an
            `ImageError`, as which the call fails, or another error, which ends the episode; None for a model that is
            shown none.
        max_result_chars: characters of a tool's result, of which the model is shown the beginning and the end.

    Metrics: `tool_calls`, `tool_errors` (calls that failed or could not be made), `cut_results` (of which a part was
    left out), `answered` (0 or 1), `attempts`.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        rewards: RewardSource | None = None,
        system_prompt: str | None = None,
        attempts: int = 1,
        pass_threshold: float = 0.5,
        end_of_turn: str = "",
        read_image: Callable[[Any], bytes] | None = None,
        max_result_chars: int = RESULT_CHARACTERS,
    ) -> None:
        self.tools: Sequence[Tool] = tuple(map(tool_for_episode, tools))
        self._own = [tool for tool, given in zip(self.tools, tools, strict=True) if tool is not given]
        self._rewards = rewards
        self._system_prompt = system_prompt
        self._prompt: Prompt | None = None
        self._allowed = attempts
        self._pass_threshold = pass_threshold
        self._end_of_turn = end_of_turn
        self._read_image = read_image
        self._max_result_chars = max_result_chars
        self._step = 0
        self._calls = self._errors = self._cut = self._attempts = 0
        self.spoken: list[Message] = []
        """The model's replies so far, with their calls, and the answers to them."""

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Starts the episode with the prompt's conversation."""
        self._prompt = prompt
        self._calls = self._errors = self._cut = self._attempts = 0
        self.spoken = []
        return with_system(prompt.messages, self._system_prompt) if prompt.messages else ()

    async def step(self, action: Action) -> StepResult:
        """Runs the calls of a reply, all at once, or accepts the reply as answer. If it raises or is cancelled, none of
        the calls goes on."""
        self.spoken.append(action.message)
        self._step = int(action.generation.versions[-1]) if action.generation.versions else 0
        if action.generation.stop_reason.truncated:
            return StepResult(metrics=self._metrics())  # truncated: its tool calls are incomplete
        if action.error is not None:
            self._errors += 1
            return self._answered([self.hint(action.error)])
        if not action.tool_calls:
            return await self._finish(str(action.message["content"]))
        calls = [asyncio.create_task(self._call(call)) for call in action.tool_calls]
        try:
            results = await asyncio.gather(*calls)
        finally:
            for running in calls:
                if not running.cancelling():  # a second time would interrupt its end
                    running.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        self._calls += len(results)
        self._errors += sum(result.is_error for result in results)
        pairs = zip(action.tool_calls, results, strict=True)
        answers = [
            self.hint(result.content)
            if call.arguments is None
            else tool_message(call, result.content, result.images if self._read_image is not None else ())
            for call, result in pairs
        ]
        answered = self._answered(answers)
        final = next((result for result in results if result.terminates), None)
        return answered if final is None else await self._finish(final.content, answers)

    async def reward_hook(self, answer: str, prompt: Prompt) -> StepResult:
        """Returns the reward of the final answer; override it, also by a plain method, to replace the run's reward."""
        if self._rewards is None:
            return StepResult(reward=None)
        request = RewardRequest(
            prompt=prompt,
            response=answer,
            stop_reason=StopReason.STOP,
            query=prompt.text + answer + self._end_of_turn,
            completion=tuple(self.spoken),
            images=prompt.images,
            step=self._step,
        )
        (reward,) = await self._rewards.score([request])
        return StepResult(
            reward=reward.value,
            score=reward.score,
            metrics=reward.metrics,
            reward_parts=reward.parts,
            answer=reward.answer,
            feedback=reward.feedback,
        )

    def hint(self, text: str) -> Message:
        """Returns a message for the model that no user sees."""
        return {"role": "user", "content": text, "visible": False}

    async def close(self) -> None:
        """Closes the tools that are its own."""
        for tool in self._own:
            await tool.close()

    async def _call(self, call: ToolCall) -> ToolResult:
        if call.error is not None or call.arguments is None:
            return ToolResult(content=call.error or "The arguments could not be read.", is_error=True)
        by_name = {tool.name: tool for tool in self.tools}
        tool = by_name.get(call.name)
        if tool is None:
            known = ", ".join(by_name)
            return ToolResult(content=f"There is no function {call.name!r}; the functions are {known}.", is_error=True)
        read = self._read_image
        try:
            with foreign_code(ForeignError):
                result = await tool.call(call.arguments)
                images = () if read is None else tuple(result.images)
        except EngineError:  # the server of the tools is lost: the model has no part in it
            raise
        except RollgradError as error:
            return _failed(call, error)
        result = self._shortened(result)
        if read is None or not images:
            return result
        try:
            # Here, because one that cannot be read would fail the episode where the conversation is rendered.
            with foreign_code(ForeignError):
                return evolve(result, images=await asyncio.to_thread(lambda: tuple(map(read, images))))
        except (ImageError, ForeignError) as error:
            return _failed(call, error)

    def _answered(self, answers: Sequence[Message]) -> StepResult:
        self.spoken += answers
        return StepResult(observation=answers, metrics=self._metrics())

    async def _finish(self, answer: str, results: Sequence[Message] = ()) -> StepResult:
        """Ends the episode with `answer`, or asks for another, after the `results` of the calls beside it."""
        assert self._prompt is not None
        # A plain method is called here, and not in a thread: it may read what tools write.
        hooked: Any = self.reward_hook(answer, self._prompt)
        judged: StepResult = await hooked if inspect.isawaitable(hooked) else hooked
        check_result("reward_hook()", judged)
        self._attempts += 1
        passed = reaches((judged.reward or 0.0) if judged.score is None else judged.score, self._pass_threshold)
        if self._attempts < self._allowed and not passed:
            again: Message = {"role": "user", "content": WRONG}
            self.spoken.append(again)
            return StepResult(observation=[*results, again], metrics=self._metrics(), score=0.0)
        return evolve(
            judged,
            terminated=True,
            metrics={**self._metrics(), "answered": 1.0, **judged.metrics},
            info={"answer": answer},
        )

    def _shortened(self, result: ToolResult) -> ToolResult:
        """Returns a result without its middle, if it is too long."""
        text, most = result.content, self._max_result_chars
        if len(text) <= most:
            return result
        self._cut += 1
        left_out = f"\n[{len(text) - most} characters are left out here]\n"
        return evolve(result, content=f"{text[: most - most // 2]}{left_out}{text[-(most // 2) :]}")

    def _metrics(self) -> dict[str, float]:
        return {
            "tool_calls": float(self._calls),
            "tool_errors": float(self._errors),
            "cut_results": float(self._cut),
            "answered": 0.0,
            "attempts": float(self._attempts),
        }


def _failed(call: ToolCall, error: RollgradError) -> ToolResult:
    """Returns the answer to a call whose tool has a defect, which is logged: the model is told no details."""
    log.warning("tool_failed", tool=call.name, error=error_text(error.__cause__ or error))
    return ToolResult(content=f"The tool {call.name!r} failed.", is_error=True)
