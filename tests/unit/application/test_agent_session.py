"""AgentSession: the conversation, in text or in messages."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from rollgrad.application.episodes.session import AgentSession
from rollgrad.application.episodes.tool_environment import ToolEnvironment
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import Action, Message, ToolCall, assistant_message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import DataError, ForeignError
from rollgrad.domain.ports.environment import Observation, StepResult, tool_schema
from rollgrad.testing.environment import FakeEnvironment
from rollgrad.testing.tool import FakeTool

USER = {"role": "user", "content": "3+4?"}
PROMPT = Prompt(token_ids=(1,), text="3+4?", messages=(USER,))
TEXT = Prompt(token_ids=(1,), text="3+4?")


class WithTools(FakeEnvironment):
    """Has a tool."""

    tools = (FakeTool(),)


def act(content: str) -> Action:
    generation = Generation(token_ids=[1], logprobs=[0.0], versions=[0], stop_reason=StopReason.STOP)
    return Action(text=content, generation=generation, message=assistant_message(content))


async def session(
    *observations: Observation, greeting: Observation = "", prompt: Prompt = PROMPT, kind: Any = FakeEnvironment
) -> AgentSession:
    """A session in which the environment has made `observations`."""

    environment = kind(
        [StepResult(observation=o, reward=float(i)) for i, o in enumerate(observations)], greeting=greeting
    )
    made = AgentSession(environment)
    await made.start(prompt)
    for i in range(len(observations)):
        await made.advance(act(f"reply {i}"))
    return made


async def test_text_stays_text() -> None:
    made = await session(" go on", "", greeting=" begin", prompt=TEXT)
    assert made.messages is None
    assert made.opening == " begin"
    assert made.tools == ()
    assert [result.reward for result in made.results] == [0.0, 1.0]
    assert made.last.reward == 1.0


async def test_tools_that_cannot_be_told_are_not_taken_for_none() -> None:
    class Misspelled(FakeEnvironment):
        @property
        def tools(self) -> Any:
            return self.toolz  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="toolz"):
        await session(kind=Misspelled)


async def test_before_the_first_step_nothing_was_answered() -> None:
    assert (await session()).last == StepResult()


async def test_messages_of_the_environment_replace_the_prompt() -> None:
    opening = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    made = await session([{"role": "user", "content": "And?"}], "text", greeting=opening)
    assert made.messages == [
        *opening,
        assistant_message("reply 0"),
        {"role": "user", "content": "And?"},
        assistant_message("reply 1"),
        {"role": "user", "content": "text"},
    ]
    assert made.opening == ""


async def test_no_messages_stand_for_the_prompts() -> None:
    assert (await session(greeting=[])).messages == [USER]


async def test_tools_make_a_conversation_of_the_prompt() -> None:
    made = await session("", greeting="Mind the gap.", kind=WithTools)
    assert made.tools == (tool_schema(WithTools.tools[0]),)
    assert made.messages == [USER, {"role": "user", "content": "Mind the gap."}, assistant_message("reply 0")]
    assert (await session(kind=WithTools)).messages == [USER]


async def test_tools_may_depend_on_the_prompt() -> None:
    class OfThePrompt(ToolEnvironment):
        async def reset(self, prompt: Prompt) -> Sequence[Message]:
            self.tools = [FakeTool()] if prompt is PROMPT else []
            return await super().reset(prompt)

    environment = OfThePrompt([])
    made = AgentSession(environment)
    await made.start(PROMPT)
    assert made.tools == (tool_schema(FakeTool()),)
    call = ToolCall(id="1", name="repeat", arguments={"text": "x"})
    await made.advance(evolve(act(""), tool_calls=(call,)))
    assert made.messages is not None
    assert made.messages[-1]["content"] == "x"
    await made.start(evolve(PROMPT, label="another"))
    assert made.tools == ()


@pytest.mark.parametrize(("greeting", "kind"), [([], FakeEnvironment), ("", WithTools), ("go", WithTools)])
async def test_a_conversation_needs_messages(greeting: Observation, kind: Any) -> None:
    with pytest.raises(DataError, match=r"--data\.apply_chat_template True"):
        await session(greeting=greeting, prompt=TEXT, kind=kind)


async def test_messages_after_a_text_opening_are_refused() -> None:
    with pytest.raises(DataError, match=r"let reset\(\) return messages too"):
        await session([{"role": "user", "content": "And?"}])


SAYS = "that is a text, or a list of messages, each with its role"


@pytest.mark.parametrize("wrong", [USER, None, ["3+4?"], ([USER], {}), [{"content": "3+4?"}]])
async def test_what_is_no_observation_is_named(wrong: Any) -> None:
    with pytest.raises(ForeignError, match=rf"environment's reset\(\) returned {re.escape(str(wrong))}, but {SAYS}"):
        await session(greeting=wrong)
    said = rf"environment's step\(\) returned the observation {re.escape(str(wrong))}, but {SAYS}"
    with pytest.raises(ForeignError, match=said):
        await session(wrong, greeting=[USER])


@pytest.mark.parametrize("wrong", [("obs", 1.0, True, False, {}), None, 1.0])
async def test_what_is_no_result_is_named(wrong: Any) -> None:
    made = AgentSession(FakeEnvironment([wrong]))
    await made.start(PROMPT)
    with pytest.raises(ForeignError, match=rf"step\(\) returned {re.escape(str(wrong))}, but it returns a StepResult"):
        await made.advance(act(""))


async def test_a_bare_function_is_no_tool() -> None:
    wrong: Any = [len]
    with pytest.raises(ForeignError, match=r"has the tool <built-in function len>, .*FunctionTool\.$"):
        await AgentSession(ToolEnvironment(wrong)).start(PROMPT)


async def test_tools_have_different_names() -> None:
    with pytest.raises(ForeignError, match=r"has two tools called repeat: rename"):
        await AgentSession(ToolEnvironment([FakeTool(), FakeTool()])).start(PROMPT)


async def test_an_opening_is_not_shared_with_its_maker() -> None:
    opening = [USER]
    made = await session("go", greeting=opening)
    assert made.messages is not None
    assert len(made.messages) == 3
    assert opening == [USER]


async def test_what_is_for_the_model_alone_is_part_of_its_conversation() -> None:
    hint = {"role": "user", "content": "hint", "visible": False}
    made = await session([hint, {"role": "user", "content": "And?", "visible": True}], greeting=[USER])
    assert made.messages is not None
    assert [m["content"] for m in made.messages] == ["3+4?", "reply 0", "hint", "And?"]
    assert hint in made.messages
