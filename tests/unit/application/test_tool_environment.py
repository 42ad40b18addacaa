"""ToolEnvironment: calls, what goes wrong in them, and the answer."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollgrad.application.episodes.session import AgentSession
from rollgrad.application.episodes.tool_environment import ToolEnvironment
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import RESULT_CHARACTERS, Action, ToolCall, ToolResult, assistant_message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError, EngineError, ForeignError, ImageError
from rollgrad.domain.ports.environment import Environment, KeepsEpisodes, StepResult
from rollgrad.testing.reward_source import FakeRewardSource
from rollgrad.testing.tool import FakeTool

PROMPT = Prompt(token_ids=(1,), text="Say x.", label="x", messages=({"role": "user", "content": "Say x."},))


class Broken(FakeTool):
    """Raises what nobody should read."""

    name = "broken"

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        raise ValueError("the password is hunter2")


class Together(FakeTool):
    """Answers only when `parties` calls are running at once."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self._barrier = asyncio.Barrier(parties)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        await self._barrier.wait()
        return await super().call(arguments)


class Keeps(FakeTool, KeepsEpisodes):
    """Counts the calls of each episode."""

    name = "keeps"

    def __init__(self) -> None:
        super().__init__(lambda text: ToolResult(content=str(len(self.calls))))
        self.made: list[Keeps] = []

    def for_episode(self) -> "Keeps":
        self.made.append(Keeps())
        return self.made[-1]


def call(text: Any = "x", name: str = "repeat", number: int = 0, **more: Any) -> ToolCall:
    return ToolCall(id=f"call{number}", name=name, arguments={"text": text}, **more)


def act(content: str = "", *calls: ToolCall, stop: StopReason = StopReason.STOP, error: str | None = None) -> Action:
    return Action(
        text=content,
        generation=Generation(token_ids=[1], logprobs=[0.0], versions=[0], stop_reason=stop),
        message=assistant_message(content, tool_calls=calls),
        tool_calls=calls,
        error=error,
    )


async def steps(environment: ToolEnvironment, *actions: Action, prompt: Prompt = PROMPT) -> list[StepResult]:
    await environment.reset(prompt)
    return [await environment.step(action) for action in actions]


def counts(
    calls: float = 0.0, errors: float = 0.0, *, answered: float = 0.0, attempts: float = 0.0
) -> dict[str, float]:
    said = {"tool_calls": calls, "tool_errors": errors, "answered": answered, "attempts": attempts}
    return {**said, "cut_results": 0.0}


def contents(result: StepResult) -> list[str]:
    assert not isinstance(result.observation, str)
    return [message["content"] for message in result.observation]


def test_it_is_an_environment() -> None:
    tool = FakeTool()
    environment = ToolEnvironment([tool])
    assert isinstance(environment, Environment)
    assert environment.tools == (tool,)


async def test_a_call_gets_its_result_and_the_answer_ends_the_episode() -> None:
    tool = FakeTool(lambda text: ToolResult(content=text * 2))
    called, answered = await steps(ToolEnvironment([tool]), act("", call("ab")), act("ab"))
    assert called.observation == [{"role": "tool", "tool_call_id": "call0", "name": "repeat", "content": "abab"}]
    assert not called.terminated
    assert called.metrics == counts(1.0, 0.0)
    assert answered.terminated
    assert answered.info == {"answer": "ab"}
    assert answered.metrics == counts(1.0, 0.0, answered=1.0, attempts=1.0)
    assert tool.calls == ["ab"]


async def test_episodes_do_not_share_what_a_tool_keeps_and_close_it() -> None:
    shared, plain = Keeps(), FakeTool()
    first, second = ToolEnvironment([shared, plain]), ToolEnvironment([shared])
    assert [
        contents(step) for step in await steps(first, act("", call(name="keeps")), act("", call(name="keeps")))
    ] == [["1"], ["2"]]
    assert [contents(step) for step in await steps(second, act("", call(name="keeps")))] == [["1"]]
    assert first.tools == (shared.made[0], plain)
    await first.close()
    assert [tool.closed for tool in (*shared.made, shared, plain)] == [True, False, False, False]
    await second.close()
    assert [tool.closed for tool in (*shared.made, shared, plain)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("left [image] and [image].", ["left ", b"1", " and ", b"2", "."]),
        ("[image]\n[image]", [b"1", "\n", b"2"]),
        ("two pictures", ["two pictures", b"1", b"2"]),
    ],
)
async def test_a_model_that_sees_is_shown_the_images_of_an_answer(content: str, parts: list[Any]) -> None:
    tool = FakeTool(lambda text: ToolResult(content=content, images=(b"1", b"2")))
    seeing, blind = ToolEnvironment([tool], read_image=bytes), ToolEnvironment([tool])
    (shown,), (told,) = await steps(seeing, act("", call())), await steps(blind, act("", call()))
    assert contents(told) == [content]
    (message,) = shown.observation
    assert isinstance(message, dict)
    assert [part.get("text", part.get("image")) for part in message["content"]] == parts
    assert [part["type"] for part in message["content"]] == ["text" if isinstance(p, str) else "image" for p in parts]


async def test_an_image_that_cannot_be_read_fails_the_call_and_not_the_episode() -> None:
    def read(image: Any) -> bytes:
        raise ImageError("An image cannot be read.")

    tool = FakeTool(lambda text: ToolResult(content="[image]", images=(b"1",)))
    (failed,) = await steps(ToolEnvironment([tool], read_image=read), act("", call()))
    assert contents(failed) == ["The tool 'repeat' failed."]
    assert failed.metrics["tool_errors"] == 1
    (untold,) = await steps(ToolEnvironment([tool]), act("", call()))
    assert contents(untold) == ["[image]"]


async def test_an_image_that_is_not_to_be_read_ends_the_episode() -> None:
    def read(image: Any) -> bytes:
        raise ConfigurationError("The chat template writes none.")

    tool = FakeTool(lambda text: ToolResult(content="[image]", images=(b"1",)))
    with pytest.raises(ConfigurationError, match="writes none"):
        await steps(ToolEnvironment([tool], read_image=read), act("", call()))


class Lasting(FakeTool):
    """Takes for ever, and some turns of the event loop to end."""

    def __init__(self, name: str = "lasting", turns: int = 1) -> None:
        super().__init__()
        self.name, self._turns = name, turns
        self.begun, self.ended = asyncio.Event(), False

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(self._turns):
                await asyncio.sleep(0)
            self.ended = True
        raise AssertionError("it waits for ever")


async def test_no_call_goes_on_after_another_has_ended_the_episode() -> None:
    def read(image: Any) -> bytes:
        raise ConfigurationError("The chat template writes none.")

    lasting, tool = Lasting(), FakeTool(lambda text: ToolResult(content="[image]", images=(b"1",)))
    with pytest.raises(ConfigurationError, match="writes none"):
        await steps(ToolEnvironment([lasting, tool], read_image=read), act("", call(name="lasting"), call()))
    assert lasting.ended


async def test_no_call_goes_on_after_the_step_is_cancelled() -> None:
    tools = [Lasting(), Lasting("other", turns=9)]
    step = asyncio.create_task(steps(ToolEnvironment(tools), act("", call(name="lasting"), call(name="other"))))
    for tool in tools:
        await tool.begun.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert all(tool.ended for tool in tools)


async def test_calls_of_one_reply_run_at_once_and_are_answered_in_order() -> None:
    tool = Together(3)
    (result,) = await steps(ToolEnvironment([tool]), act("", *(call(str(i), number=i) for i in range(3))))
    assert contents(result) == ["0", "1", "2"]
    assert [m["tool_call_id"] for m in result.observation if not isinstance(m, str)] == ["call0", "call1", "call2"]
    assert result.metrics["tool_calls"] == 3.0


async def test_an_unknown_tool_is_told() -> None:
    environment = ToolEnvironment([FakeTool(), Broken()])
    unread = call(name="other", number=1, error="There is no function 'other'.")
    (result,) = await steps(environment, act("", call(name="other"), unread, call(number=2)))
    assert contents(result) == [
        "There is no function 'other'; the functions are repeat, broken.",
        "There is no function 'other'.",
        "x",
    ]
    assert result.metrics == counts(3.0, 2.0)
    assert not result.terminated


async def test_bad_arguments_are_told() -> None:
    environment = ToolEnvironment([tool := FakeTool()])
    unreadable = ToolCall(id="c", name="repeat", arguments=None, error="The arguments are not valid JSON.")
    mistyped, hinted = await steps(environment, act("", call(3)), act("", unreadable))
    assert mistyped.metrics["tool_errors"] == 1.0
    assert "text" in contents(mistyped)[0]
    assert hinted.observation == [environment.hint("The arguments are not valid JSON.")]
    assert hinted.metrics["tool_errors"] == 2.0
    assert tool.calls == []


async def test_a_tool_that_raises_ends_nothing_and_tells_no_details() -> None:
    (result,) = await steps(ToolEnvironment([Broken(), FakeTool()]), act("", call(name="broken"), call(number=1)))
    assert contents(result) == ["The tool 'broken' failed.", "x"]
    assert result.metrics == counts(2.0, 1.0)


async def test_a_server_of_tools_that_is_lost_is_no_mistake_of_the_model() -> None:
    class Lost(FakeTool):
        async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
            raise EngineError("The server has ended and did not come back.")

    with pytest.raises(EngineError, match="did not come back"):
        await steps(ToolEnvironment([Lost()]), act("", call()))


async def test_a_huge_result_loses_its_middle() -> None:
    whole, huge = "x" * RESULT_CHARACTERS, f"begin{'x' * 10**7}end"
    results = await steps(ToolEnvironment([FakeTool()]), act("", call(whole)), act("", call(huge)))
    kept, cut = (contents(result)[0] for result in results)
    assert kept == whole
    assert len(cut) < RESULT_CHARACTERS + 100
    assert cut.startswith("begin")
    assert cut.endswith("end")
    assert f"\n[{len(huge) - RESULT_CHARACTERS} characters are left out here]\n" in cut
    assert [result.metrics["cut_results"] for result in results] == [0.0, 1.0]


async def test_how_much_of_a_result_is_shown_can_be_set() -> None:
    environment = ToolEnvironment([FakeTool()], max_result_chars=5)
    kept, cut = (
        contents(step)[0] for step in await steps(environment, act("", call("12345")), act("", call("123456")))
    )
    assert (kept, cut) == ("12345", "123\n[1 characters are left out here]\n56")


async def test_a_reply_that_could_not_be_read_gets_a_hint() -> None:
    environment = ToolEnvironment([FakeTool()])
    (result,) = await steps(environment, act("{", error="The tool call could not be read."))
    assert result.observation == [environment.hint("The tool call could not be read.")]
    assert result.metrics == counts(0.0, 1.0)
    assert not result.terminated


async def test_a_terminating_result_is_the_answer() -> None:
    tool = FakeTool(lambda text: ToolResult(content=text, terminates=text == "done"))
    rewards = FakeRewardSource(lambda request: float(request.response == "done"))
    (result,) = await steps(ToolEnvironment([tool], rewards=rewards), act("", call("x"), call("done", number=1)))
    assert result.terminated
    assert result.reward == 1.0
    assert result.info == {"answer": "done"}
    assert result.metrics == counts(2.0, 0.0, answered=1.0, attempts=1.0)


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.ABORTED])
async def test_a_reply_that_was_cut_off_calls_and_answers_nothing(stop: StopReason) -> None:
    tool, rewards = FakeTool(), FakeRewardSource()
    environment = ToolEnvironment([tool], rewards=rewards)
    called, said, unread = await steps(
        environment, act("", call(), stop=stop), act("x", stop=stop), act("x", stop=stop, error="unread")
    )
    assert tool.calls == []
    assert rewards.requests == []
    for result in (called, said, unread):
        assert result == StepResult(metrics=counts(0.0, 0.0))


async def test_the_runs_reward_judges_the_answer() -> None:
    rewards = FakeRewardSource()
    (right,) = await steps(ToolEnvironment([FakeTool()], rewards=rewards), act("x"))
    (wrong,) = await steps(ToolEnvironment([FakeTool()], rewards=rewards), act("y"))
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert [(request.prompt, request.response) for request in rewards.requests] == [(PROMPT, "x"), (PROMPT, "y")]
    (unjudged,) = await steps(ToolEnvironment([]), act("x"))
    assert unjudged.reward is None, "so that the run's reward is asked"
    assert unjudged.terminated


async def test_the_reward_is_told_of_the_calls_before_the_answer() -> None:
    rewards = FakeRewardSource()
    tool = FakeTool(lambda text: ToolResult(content=text, terminates=text == "end"))
    environment = ToolEnvironment([tool], rewards=rewards, attempts=2)
    ended = act("", call("end"))
    said = await steps(environment, act("", call("x")), act("", error="Unreadable."), act("y"), ended)
    assert said[-1].terminated
    first, second = (list(request.completion) for request in rewards.requests)
    assert [message["role"] for message in first] == ["assistant", "tool", "assistant", "user", "assistant"]
    assert first[0]["tool_calls"][0]["function"]["arguments"] == {"text": "x"}
    assert [message["content"] for message in first[1:]] == ["x", "", "Unreadable.", "y"]
    told = [message["content"] for message in second]
    assert told == ["", "x", "", "Unreadable.", "y", *contents(said[2]), "", "end"]
    assert second[-1]["role"] == "tool"
    await environment.reset(PROMPT)
    assert environment.spoken == []


async def test_another_reward_may_be_given_with_metrics_and_parts() -> None:
    class Judged(ToolEnvironment):
        async def reward_hook(self, answer: str, prompt: Prompt) -> StepResult:
            return StepResult(
                reward=0.5, score=1.0, metrics={"length": float(len(answer))}, reward_parts={"style": 0.5}
            )

    class Plain(ToolEnvironment):
        def reward_hook(self, answer: str, prompt: Prompt) -> Any:  # as users may write it
            return StepResult(
                reward=0.5, score=1.0, metrics={"length": float(len(answer))}, reward_parts={"style": 0.5}
            )

    for environment in (Judged([FakeTool()]), Plain([FakeTool()])):
        (result,) = await steps(environment, act("abc"))
        assert (result.reward, result.score, result.terminated) == (0.5, 1.0, True)
        assert result.metrics == {**counts(answered=1.0, attempts=1.0), "length": 3.0}
        assert result.reward_parts == {"style": 0.5}


async def test_a_reward_hook_returns_a_result() -> None:
    class Number(ToolEnvironment):
        def reward_hook(self, answer: str, prompt: Prompt) -> Any:
            return 1.0

    with pytest.raises(ForeignError, match=r"reward_hook\(\) returned 1\.0, but it returns a StepResult"):
        await steps(Number([]), act("x"))


def test_the_system_prompt_stands_before_conversations_that_have_none() -> None:
    system = {"role": "system", "content": "Be kind."}
    own = Prompt(token_ids=(1,), text="", messages=({"role": "system", "content": "Be rude."}, *PROMPT.messages))
    text = Prompt(token_ids=(1,), text="x")

    def opening(prompt: Prompt, system_prompt: str | None = "Be kind.") -> Sequence[Any]:
        return list(asyncio.run(ToolEnvironment([], system_prompt=system_prompt).reset(prompt)))

    assert opening(PROMPT) == [system, *PROMPT.messages]
    assert opening(own) == list(own.messages)
    assert opening(PROMPT, None) == list(PROMPT.messages)
    assert opening(text) == []


async def test_an_episode_counts_its_own_calls() -> None:
    environment = ToolEnvironment([FakeTool()])
    await steps(environment, act("", call(3)))
    (again,) = await steps(environment, act("x"))
    assert again.metrics == counts(0.0, 0.0, answered=1.0, attempts=1.0)


async def test_hints_are_for_the_model_alone() -> None:
    session = AgentSession(ToolEnvironment([FakeTool()]))
    await session.start(PROMPT)
    await session.advance(act("{", error="Unreadable."))
    await session.advance(act("", call()))
    await session.advance(act("x"))
    assert session.messages is not None
    assert [m["content"] for m in session.messages] == ["Say x.", "{", "Unreadable.", "", "x", "x"]
    hidden = [m["content"] for m in session.messages if not m.get("visible", True)]
    assert hidden == ["Unreadable."]


async def test_closing_leaves_the_tools_to_their_maker() -> None:
    tool = FakeTool()

    environment = ToolEnvironment([tool])
    await environment.close()
    await environment.close()
    assert not tool.closed


async def test_a_wrong_answer_may_be_followed_by_another() -> None:
    environment = ToolEnvironment([FakeTool()], rewards=FakeRewardSource(), attempts=3)
    first, called, second, right = await steps(environment, act("y"), act("", call("x")), act("z"), act("x"))
    for wrong, attempts in ((first, 1.0), (second, 2.0)):
        assert wrong.observation == [{"role": "user", "content": "That is not right. Try again."}]
        assert (wrong.terminated, wrong.reward, wrong.score) == (False, 0.0, 0.0)
        assert wrong.metrics == counts(attempts - 1.0, attempts=attempts)
    assert contents(called) == ["x"]
    assert (right.terminated, right.reward) == (True, 1.0)
    assert right.metrics == counts(1.0, answered=1.0, attempts=3.0)


async def test_the_last_attempt_ends_the_episode_right_or_wrong() -> None:
    environment = ToolEnvironment([], rewards=FakeRewardSource(), attempts=2)
    first, last = await steps(environment, act("y"), act("z"))
    assert (first.terminated, last.terminated, last.reward) == (False, True, 0.0)
    assert last.metrics == counts(answered=1.0, attempts=2.0)


async def test_an_answer_passes_at_the_threshold() -> None:
    rewards = FakeRewardSource(lambda request: 0.25)
    (passed,) = await steps(ToolEnvironment([], rewards=rewards, attempts=2, pass_threshold=0.25), act("x"))
    assert passed.terminated
    (failed,) = await steps(ToolEnvironment([], rewards=rewards, attempts=2), act("x"))
    assert not failed.terminated
