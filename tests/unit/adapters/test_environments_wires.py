"""OpenEnv and NeMo Gym clients against real servers that speak their wires, answer, fail, hang and hang up."""

import asyncio
import builtins
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollgrad.adapters.environments.nemo_gym import NemoGymEnvironment
from rollgrad.adapters.environments.openenv import OpenEnvEnvironment
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import Action, ToolCall, assistant_message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError, MissingExtraError
from rollgrad.domain.ports.environment import Environment, StepResult
from tests.fakes.environment_servers import NEMO_GYM_TOOLS, error, nemo_gym_app, openenv_app, serve

UNUSED = "http://127.0.0.1:9"


def act(text: str, *calls: ToolCall) -> Action:
    generation = Generation(token_ids=[1], logprobs=[-1.0], versions=[0], stop_reason=StopReason.STOP)
    return Action(
        text=text, generation=generation, message=assistant_message(text, tool_calls=calls), tool_calls=tuple(calls)
    )


def add(by: Any, id: str = "c1") -> ToolCall:
    return ToolCall(id=id, name="add", arguments={"by": by})


def ask(**given: Any) -> Prompt:
    return Prompt(token_ids=(1,), text="Play.", messages=({"role": "user", "content": "Play."},), **given)


async def play(environment: Environment, prompt: Prompt, *actions: Action) -> tuple[Any, list[StepResult]]:
    try:
        start = await environment.reset(prompt)
        return start, [await environment.step(action) for action in actions]
    finally:
        await environment.close()


async def hang() -> Any:
    await asyncio.sleep(30)


def hurried(asks: Any, method: str, about: str) -> None:
    """`asks` waits 0.2 seconds for what it asks by a method about that, and a minute for all else."""
    patient = getattr(asks, method)

    async def ask(what: str, *arguments: Any) -> Any:
        asks._timeout = 0.2 if what == about else 60.0
        return await patient(what, *arguments)

    setattr(asks, method, ask)


async def hang_up() -> Any:
    raise ConnectionError


# --- OpenEnv


async def test_openenv_plays_an_episode() -> None:
    heard: list[dict[str, Any]] = []
    with serve(openenv_app(heard)) as url:
        start, results = await play(OpenEnvEnvironment(url), ask(label=17), act("3"), act(" 7 "))
    assert start == [{"role": "user", "content": 'Play.\n\n{"text": "Guess a digit."}'}]
    assert results[0].observation == [{"role": "user", "content": '{"text": "no"}'}]
    assert [(result.reward, result.terminated) for result in results] == [(-0.1, False), (1.0, True)]
    assert results[1].info == {"steps": 2}
    assert heard == [
        {"type": "reset", "data": {"seed": 17}},
        {"type": "step", "data": {"message": "3"}},
        {"type": "step", "data": {"message": " 7 "}},
        {"type": "close"},
        {"type": "gone"},
    ]


async def test_openenv_tells_the_model_of_invalid_actions() -> None:
    def parse(reply: str) -> dict[str, Any]:
        return {"message": int(reply)}

    with serve(openenv_app()) as url:
        environment = OpenEnvEnvironment(url, parse=parse, render=lambda fields: fields["text"])
        _, results = await play(environment, ask(), act("one"), act("1"))
    assert [result.metrics for result in results] == [{"invalid_actions": 1.0}, {"invalid_actions": 2.0}]
    assert "invalid literal for int" in results[0].observation[0]["content"]  # type: ignore[index, call-overload]
    assert results[1].observation == [
        {"role": "user", "content": "That is no valid action: message: Input should be a valid string"}
    ]


@pytest.mark.parametrize("kind", ["reset", "step"])
@pytest.mark.parametrize(
    ("answer", "raised", "message"),
    [
        (hang, TimeoutError, r"Waited 0\.2 s for the answer to {kind} of the OpenEnv server ws://"),
        (hang_up, ConnectionError, "hung up before it answered {kind}"),
        ("error", RuntimeError, r"failed: no more dice \(EXECUTION_ERROR\)"),
        ("nonsense", RuntimeError, "answered {kind} with"),
    ],
    ids=["hang", "hang_up", "error", "nonsense"],
)
async def test_openenv_failures_raise(kind: str, answer: Any, raised: type[Exception], message: str) -> None:
    async def say() -> Any:
        return error("EXECUTION_ERROR", "no more dice") if answer == "error" else ["what"]

    with serve(openenv_app(hooks={kind: say if isinstance(answer, str) else answer})) as url:
        environment = OpenEnvEnvironment(url)
        if answer is hang:
            hurried(environment, "_in_time", f"the answer to {kind}")
        with pytest.raises(raised, match=message.format(kind=kind)):
            await play(environment, ask(), act("1"))


async def test_openenv_nobody_there() -> None:
    with pytest.raises(ConnectionError, match="No connection to the OpenEnv server ws://127"):
        await play(OpenEnvEnvironment(UNUSED), ask())
    with pytest.raises(ConnectionError, match="reset comes first"):
        await OpenEnvEnvironment(UNUSED).step(act("1"))


def test_openenv_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"url is 'localhost:80', but it starts with http://"):
        OpenEnvEnvironment("localhost:80")
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("websockets"):
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"rollgrad\[openenv\]"):
        OpenEnvEnvironment(UNUSED)


# --- NeMo Gym


async def test_nemo_gym_runs_tools_and_verifies() -> None:
    verified: list[dict[str, Any]] = []
    prompt = ask(metadata={"goal": 5})
    with serve(nemo_gym_app(verified)) as url:
        environment = NemoGymEnvironment(url, tools=NEMO_GYM_TOOLS)
        assert [tool.name for tool in environment.tools] == ["add"]
        assert environment.tools[0].parameters == NEMO_GYM_TOOLS[0]["parameters"]
        start, results = await play(
            environment, prompt, act("First.", add(2), add(3, "c2")), act("", add("x", "c3")), act("Done.")
        )
    assert start == [{"role": "user", "content": "Play."}]
    contents = [message["content"] for result in results for message in result.observation]  # type: ignore[index, call-overload]
    assert contents == ['{"count":2}', '{"count":5}', '{"detail":"by: Input should be a valid integer"}']
    assert [(result.reward, result.terminated) for result in results] == [(0.0, False), (0.0, False), (1.0, True)]
    expected = {"tool_calls": 3.0, "tool_errors": 1.0, "answered": 1.0, "distance": 0.0}
    assert expected.items() <= results[2].metrics.items()
    (body,) = verified
    assert body["goal"] == 5
    assert body["responses_create_params"]["input"] == [{"role": "user", "content": "Play."}]
    assert body["responses_create_params"]["tools"][0]["name"] == "add"
    kinds = [item["type"] for item in body["response"]["output"]]
    outputs, calls = ["function_call_output"], ["function_call"]
    assert kinds == ["message", *calls * 2, *outputs * 2, *calls, *outputs, "message"]
    assert body["response"]["output"][1] == {
        "type": "function_call",
        "call_id": "c1",
        "name": "add",
        "arguments": '{"by": 2}',
    }
    assert body["response"]["output"][3] == {"type": "function_call_output", "call_id": "c1", "output": '{"count":2}'}


async def test_nemo_gym_sessions_are_apart() -> None:
    async def scenario(url: str) -> list[float]:
        games = [
            play(
                NemoGymEnvironment(url, tools=NEMO_GYM_TOOLS), ask(metadata={"goal": n}), act("", add(2)), act("Done.")
            )
            for n in range(4)
        ]
        return [results[-1].reward for _, results in await asyncio.gather(*games)]

    with serve(nemo_gym_app()) as url:
        assert await scenario(url) == [0.0, 0.0, 1.0, 0.0]


def test_nemo_gym_takes_schemas_of_chat_completions() -> None:
    (tool,) = NemoGymEnvironment(UNUSED, tools=[{"type": "function", "function": {"name": "look"}}]).tools
    assert (tool.name, tool.description, tool.parameters) == ("look", "", {"type": "object", "properties": {}})


def answering(status: int, body: Any) -> Callable[[], Any]:
    async def answer() -> Response:
        return JSONResponse(body, status)

    return answer


async def endless() -> StreamingResponse:
    """Answers without end, as a stream of events, which nobody asked for."""

    async def parts() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 2**20
            await asyncio.sleep(0)  # without which the server would never hear that its client has left

    return StreamingResponse(parts(), media_type="text/event-stream")


@pytest.mark.parametrize(
    ("path", "answer", "raised", "message"),
    [
        ("/seed_session", hang, TimeoutError, r"Waited 0\.2 s for the NeMo Gym server .* POST /seed_session"),
        ("/add", hang, TimeoutError, r"Waited 0\.2 s for the NeMo Gym server .* POST /add"),
        ("/verify", hang, TimeoutError, r"Waited 0\.2 s for the NeMo Gym server .* POST /verify"),
        ("/seed_session", answering(422, "no"), RuntimeError, "POST /seed_session with 422"),
        ("/verify", answering(500, "no"), RuntimeError, "POST /verify with 500"),
        ("/verify", answering(200, {"reward": None}), RuntimeError, "with the reward None"),
        ("/verify", answering(200, [1]), RuntimeError, "with the reward None"),
        (
            "/verify",
            answering(200, {"reward": 0.0, "mask_sample": True, "failure_reason": "the judge is away"}),
            RuntimeError,
            "could not verify the episode: the judge is away",
        ),
        *((path, endless, ConnectionError, "more than 16,777,216 bytes") for path in ("/add", "/verify")),
    ],
)
async def test_nemo_gym_failures_raise(path: str, answer: Any, raised: type[Exception], message: str) -> None:
    with serve(nemo_gym_app(hooks={path: answer})) as url:
        environment = NemoGymEnvironment(url, tools=NEMO_GYM_TOOLS)
        if answer is hang:
            hurried(environment._server, "post", path.removeprefix("/"))
        with pytest.raises(raised, match=message):
            await play(environment, ask(), act("", add(1)), act("Done."))


async def test_nemo_gym_a_server_that_dies_is_no_mistake_of_the_model() -> None:
    async def scenario(environment: NemoGymEnvironment, url: Any) -> None:
        with url as address:
            environment._server.url = address
            await environment.reset(ask())
        with pytest.raises(ConnectionError, match="did not answer POST /add"):
            await environment.step(act("", add(1)))
        await environment.close()

    await scenario(NemoGymEnvironment(UNUSED, tools=NEMO_GYM_TOOLS), serve(nemo_gym_app()))


async def test_nemo_gym_settings() -> None:
    with pytest.raises(ConnectionError, match="did not answer POST /seed_session"):
        await play(NemoGymEnvironment(UNUSED), ask())
    with pytest.raises(ConfigurationError, match="url is 'gym', but it starts with http://"):
        NemoGymEnvironment("gym")
