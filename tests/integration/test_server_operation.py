"""The operation of an agent server on a real socket: counts, log, readiness, limits, and its end."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx2
import pytest
import structlog

from rollgrad.adapters.servers import agent_server, operation
from rollgrad.adapters.servers.agent_server import AgentServer
from rollgrad.adapters.servers.operation import Loaded, Operation, needs_token
from rollgrad.adapters.servers.server import Server
from rollgrad.application.episodes.chat_service import ChatService
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.errors import CheckpointError, EngineError
from rollgrad.testing.chat_codec import EOS, FakeChatCodec
from tests.fakes.scripted_engine import ScriptedEngine

TOKEN = "secret-token"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "my private words"}]
WIRES: dict[str, tuple[dict[str, Any], Callable[[str], str]]] = {
    CHAT: ({"messages": MESSAGES}, lambda told: f'data: {{"error": {{"message": "{told}", "type": '),
    "/v1/completions": ({"prompt": "go"}, lambda told: f'data: {{"error": {{"message": "{told}", "type": '),
    "/v1/responses": (
        {"input": "go"},
        lambda told: f'"error": {{"code": "server_error", "message": "overloaded_error: {told}"}}',
    ),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 20},
        lambda told: (
            f'event: error\ndata: {{"type": "error", "error": {{"type": "overloaded_error", "message": "{told}"}}}}\n\n'
        ),
    ),
}
"""A body for each wire, and the error that ends its stream."""
SECONDS = 60.0


@pytest.fixture(autouse=True)
def _streams_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose engine has said nothing yet."""
    monkeypatch.setattr(agent_server, "KEEP_ALIVE_SECONDS", 0.05)


class Operated:
    """A server with one scripted engine."""

    def __init__(self, **limits: Any) -> None:
        codec = FakeChatCodec()
        self.engine = ScriptedEngine(codec, EOS, lambda prompt: "a reply")
        service = ChatService(self.engine, codec, max_waiting=limits.pop("max_waiting", 100))

        async def answer(request: Any, on_piece: Any) -> Any:
            return await service.reply(request, SamplingParams(), on_piece=on_piece)

        seconds = limits.pop("stop_seconds", SECONDS)
        operated = Operation(service, **limits)
        app = AgentServer(service, codec, model="m", answer=answer, operation=operated).app()
        self.server = Server(app, token=TOKEN, name="agent server", guarded=needs_token, stop_seconds=seconds)
        self.http: httpx2.AsyncClient

    async def ask(self, **more: Any) -> Any:
        body = {"messages": MESSAGES, **more}
        return await self.http.post(CHAT, json=body)

    async def waiting(self, count: int) -> None:
        async with asyncio.timeout(SECONDS):
            while self.engine.waiting < count:
                await asyncio.sleep(0.005)


async def play(scenario: Callable[[Operated], Awaitable[None]], **limits: Any) -> None:
    operated = Operated(**limits)
    url = await operated.server.start()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx2.AsyncClient(base_url=url, timeout=SECONDS, headers=headers) as operated.http:
        await scenario(operated)
    operated.engine.free.set()
    await operated.server.stop()


async def test_counts_and_log_tell_no_content() -> None:
    async def scenario(operated: Operated) -> None:
        with structlog.testing.capture_logs() as logs:
            assert (await operated.ask()).status_code == 200
            assert (await operated.ask(stream=True)).status_code == 200
            assert (await operated.ask(temperature=9)).status_code == 400
            await operated.http.post("/s/the-key-of-a-session/v1/messages", json={})
        told = (await operated.http.get("/metrics")).text
        assert f'rollgrad_requests_total{{path="{CHAT}",status="200"}} 2.0' in told
        assert f'rollgrad_requests_total{{path="{CHAT}",status="400"}} 1.0' in told
        assert 'rollgrad_requests_total{path="other"' in told
        assert "rollgrad_request_seconds_count 4.0" in told
        assert "rollgrad_first_token_seconds_count 1.0" in told  # of the one that streams
        replies = sum(len(reply.token_ids) for _, reply in operated.engine.said)
        prompts = sum(len(prompt) for prompt, _ in operated.engine.said)
        assert f'rollgrad_tokens_total{{kind="reply"}} {replies:.1f}' in told
        assert f'rollgrad_tokens_total{{kind="prompt"}} {prompts:.1f}' in told
        assert [(log["path"], log["status"]) for log in logs if log["event"] == "request"] == [
            (CHAT, 200),
            (CHAT, 200),
            (CHAT, 400),
            ("other", 410),
        ]
        asked = [log for log in logs if log["event"] == "request"]
        assert sum(log.get("reply_tokens", 0) for log in asked) == replies
        assert sum(log.get("prompt_tokens", 0) for log in asked) == prompts
        assert len({log["request_id"] for log in asked}) == len(asked)
        assert not any(secret in f"{logs} {told}" for secret in ("private", "a reply", "the-key", TOKEN))

    await play(scenario)


async def test_the_checkpoint_that_is_loaded_is_told() -> None:
    async def scenario(operated: Operated) -> None:
        health = (await operated.http.get("/health")).json()
        assert health == {"status": "ok", "model": "m", "in_flight": 0, "checkpoint": "step_3", "reloads": 2}
        told = (await operated.http.get("/metrics")).text
        assert ("rollgrad_reloads 2.0" in told, "rollgrad_reload_failures 1.0" in told) == (True, True)

    await play(scenario, loaded=lambda: Loaded(checkpoint="step_3", reloads=2, failures=1))


async def test_a_reload_needs_the_token_and_says_what_is_loaded() -> None:
    told = iter([{"model": "step_3", "version": 1}])

    async def reload() -> Mapping[str, Any]:
        try:
            return next(told)
        except StopIteration:
            raise CheckpointError("There is nothing newer.") from None

    async def scenario(operated: Operated) -> None:
        async with httpx2.AsyncClient(base_url=str(operated.server.url), timeout=SECONDS) as stranger:
            assert (await stranger.post("/reload")).status_code == 401
        assert (await operated.http.post("/reload")).json() == {"model": "step_3", "version": 1}
        failed = await operated.http.post("/reload")
        assert (failed.status_code, failed.json()["error"]["message"]) == (503, "There is nothing newer.")

    await play(scenario, reload=reload)


async def test_only_probes_need_no_token() -> None:
    async def scenario(operated: Operated) -> None:
        async with httpx2.AsyncClient(base_url=str(operated.server.url), timeout=SECONDS) as stranger:
            assert (await stranger.get("/health")).status_code == 200
            assert (await stranger.get("/ready")).json() == {"status": "ready"}
            assert (await stranger.get("/metrics")).status_code == 401

    await play(scenario)


async def test_a_server_whose_engine_has_died_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "CHECK_SECONDS", 0.01)
    answers: list[Exception | asyncio.Event] = [EngineError("vLLM's processes have died."), asyncio.Event()]

    async def check() -> None:
        if answers:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            await answer.wait()

    async def scenario(operated: Operated) -> None:
        for reason in ("dead", "silent"):
            told = await operated.http.get("/ready")
            assert (told.status_code, told.json()) == (503, {"status": "failed"}), reason
        assert (await operated.http.get("/health")).status_code == 200
        assert (await operated.http.get("/ready")).status_code == 200

    await play(scenario, check=check)


async def test_a_client_with_too_many_requests_waits_and_a_full_server_is_not_ready() -> None:
    async def scenario(operated: Operated) -> None:
        operated.engine.free.clear()
        held = [asyncio.create_task(operated.ask()) for _ in range(2)]
        await operated.waiting(2)
        refused = await operated.ask()
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert "This client has 2 requests in flight" in refused.json()["error"]["message"]
        assert (await operated.http.get("/ready")).status_code == 503
        assert (await operated.http.post("/reload")).json() == {"version": 1}, "which is the operator's"
        operated.engine.free.set()
        assert [(await each).status_code for each in held] == [200, 200]
        assert (await operated.ask()).status_code == 200
        assert (await operated.http.get("/ready")).status_code == 200

    async def reload() -> Mapping[str, Any]:
        return {"version": 1}

    await play(scenario, client_requests=2, max_waiting=2, reload=reload)


async def test_answers_in_flight_are_finished_when_the_server_stops() -> None:
    async def scenario(operated: Operated) -> None:
        operated.engine.free.clear()
        held = [asyncio.create_task(operated.ask(stream=stream)) for stream in (False, True)]
        await operated.waiting(2)
        stopping = asyncio.create_task(operated.server.stop())
        await asyncio.sleep(0)
        operated.engine.free.set()
        plain, streamed = [await each for each in held]
        assert plain.json()["choices"][0]["message"]["content"] == "a reply"
        assert streamed.text.endswith("data: [DONE]\n\n")
        await stopping

    await play(scenario)


async def streams(operated: Operated) -> list["asyncio.Task[str]"]:
    """A stream of each wire, of which a first piece has come."""
    operated.engine.free.clear()

    async def read(path: str, begun: asyncio.Event) -> str:
        text = ""
        async with operated.http.stream("POST", path, json={**WIRES[path][0], "stream": True}) as answer:
            assert answer.status_code == 200
            async for chunk in answer.aiter_text():
                text += chunk
                begun.set()
        return text

    begun = {path: asyncio.Event() for path in WIRES}
    tasks = [asyncio.create_task(read(path, begun[path])) for path in WIRES]
    for each in begun.values():
        await asyncio.wait_for(each.wait(), SECONDS)
    return tasks


@pytest.mark.parametrize(
    ("stop_seconds", "told"),
    [(SECONDS, "The engine has died."), (0, "The server is stopping: ask again.")],
    ids=["engine dies", "server stops"],
)
async def test_a_stream_that_fails_says_so_in_its_protocol_and_is_counted_as_failed(
    stop_seconds: float, told: str
) -> None:
    async def scenario(operated: Operated) -> None:
        tasks = await streams(operated)
        with structlog.testing.capture_logs() as logs:
            if stop_seconds:
                operated.engine.dead = True
                operated.engine.free.set()
            else:
                await operated.server.stop()
            for (_, error), task in zip(WIRES.values(), tasks, strict=True):
                text = await task
                assert error(told) in text
                assert "[DONE]" not in text
                assert "message_stop" not in text
        if stop_seconds:
            counted = (await operated.http.get("/metrics")).text
            for path in WIRES:
                assert f'rollgrad_requests_total{{path="{path}",status="503"}} 1.0' in counted
        assert {log["path"]: log["status"] for log in logs if log["event"] == "request"} == dict.fromkeys(WIRES, 503)

    await play(scenario, stop_seconds=stop_seconds)


async def test_a_defect_in_the_midst_of_a_stream_is_an_error_that_tells_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("what nobody should read")

    async def scenario(operated: Operated) -> None:
        tasks = await streams(operated)
        monkeypatch.setattr("rollgrad.adapters.servers.openai_wire.CompletionChunks._end", broken)
        with structlog.testing.capture_logs() as logs:
            operated.engine.free.set()
            for path, task in zip(WIRES, tasks, strict=True):
                assert ("The server failed to answer" in await task) == path.endswith("completions")
                assert "nobody" not in await task
        assert sorted(log["status"] for log in logs if log["event"] == "request") == [200, 200, 500, 500]
        assert sum(log["event"] == "stream_failed" for log in logs) == 2

    await play(scenario)


async def test_a_client_that_leaves_a_stream_is_counted_as_one_that_left() -> None:
    async def scenario(operated: Operated) -> None:
        tasks = await streams(operated)
        with structlog.testing.capture_logs() as logs:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with asyncio.timeout(SECONDS):
                while len(logs) < len(WIRES):
                    await asyncio.sleep(0.005)
        assert operated.engine.cancelled == len(WIRES)
        assert {log["path"]: log["status"] for log in logs} == dict.fromkeys(WIRES, 499)

    await play(scenario)


async def test_an_answer_that_has_not_begun_when_the_server_stops_is_a_503_in_counts_too() -> None:
    async def scenario(operated: Operated) -> None:
        operated.engine.free.clear()
        with structlog.testing.capture_logs() as logs:
            held = asyncio.create_task(operated.ask())
            await operated.waiting(1)
            await operated.server.stop()
            assert (await held).status_code == 503
        assert [log["status"] for log in logs if log["event"] == "request"] == [503]

    await play(scenario, stop_seconds=0)
