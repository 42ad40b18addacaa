"""Engines by URL against real HTTP servers that answer as vLLM does, fail, hang, vanish and come back."""

import asyncio
import json
import logging.handlers
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.engines.vllm_server.client import TOKEN_VARIABLE, ServerClient
from rollgrad.adapters.engines.vllm_server.core import ServedCore
from rollgrad.adapters.engines.vllm_server.endpoints import CompletionsWire, TokensWire
from rollgrad.adapters.engines.vllm_server.engine import ServedEngine
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.engines.fleet_member import Taker
from rollgrad.domain.control.engine_health import FleetBounds
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode
from tests.fakes.model_server import ModelServer

Serve = Callable[..., ModelServer]
SECONDS = 60
"""After which a test has hung."""


@pytest.fixture
def held_port() -> Iterator[int]:
    """A port that no other process is given, whether or not a server of the test listens there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does, which shares the port then
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[ModelServer] = []

    def start(**lacking: Any) -> ModelServer:
        servers.append(ModelServer(**lacking))
        return servers[-1]

    yield start
    for server in servers:
        server.hold.set()
        server.close()


def ask(seed: int = 0, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=(5, 6, 7), params=SamplingParams(**{"max_new_tokens": 4, "seed": seed, **params})
    )


def engine_of(url: str, **settings: Any) -> ServedEngine:
    return ServedEngine(url, eos_token_ids=[2], vocabulary=50, **settings)


async def using(engine: ServedEngine, work: Callable[[ServedEngine], Coroutine[Any, Any, Any]]) -> Any:
    """Returns the result of `work` with an engine that is ready."""

    async with asyncio.timeout(SECONDS):
        await engine.ready()
        try:
            return await work(engine)
        finally:
            await engine.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_ids_go_out_and_ids_come_back_with_the_versions_of_their_weights(serve: Serve) -> None:
    server = serve()
    heard: list[int] = []

    async def work(engine: ServedEngine) -> Generation:
        await engine.require_weights()
        engine.set_version(7)
        return await engine.generate(
            ask(seed=9, temperature=0.6, stop_token_ids=(33,), stop_strings=("x",)), on_token=heard.append
        )

    engine = engine_of(server.url + "/v1/")
    generation: Generation = await using(engine, work)
    assert engine.max_tokens == 512
    assert list(generation.token_ids) == heard == [100, 101, 102, 103]
    assert list(generation.logprobs) == [-0.5] * 4
    assert list(generation.versions) == [7] * 4
    assert generation.stop_reason is StopReason.LENGTH
    body = server.bodies[-1]
    assert body["token_ids"] == [5, 6, 7]
    expected = {"temperature": 0.6, "seed": 9, "stop_token_ids": [2, 33], "ignore_eos": True, "detokenize": True}
    assert {key: body["sampling_params"][key] for key in expected} == expected


async def test_a_server_of_completions_in_token_ids_samples_but_takes_no_weights(serve: Serve) -> None:
    server = serve(tokens=False, develops=False)

    async def work(engine: ServedEngine) -> Generation:
        with pytest.raises(
            ConfigurationError, match=r"--enable-scale-out.* and .*VLLM_SERVER_DEV_MODE=1.*rollgrad eval"
        ):
            await engine.require_weights()
        await engine.ping()
        return await engine.generate(ask())

    generation: Generation = await using(engine_of(server.url), work)
    assert list(generation.token_ids) == [100, 101, 102, 103]
    assert list(generation.versions) == [0] * 4
    assert server.bodies[-1]["prompt"] == [5, 6, 7]
    assert server.bodies[-1]["model"] == "policy"


@pytest.mark.parametrize(
    ("lacking", "option"),
    [
        ({"tokens": False}, "--enable-scale-out"),
        ({"processed": False}, "--logprobs-mode processed_logprobs"),
        ({"develops": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"backend": None}, """--weight-transfer-config '{"backend": "rollgrad"}'"""),
        ({"backend": "nccl"}, """--weight-transfer-config '{"backend": "rollgrad"}'"""),
    ],
)
async def test_what_a_server_lacks_for_training_is_named_with_its_option(
    serve: Serve, lacking: dict[str, Any], option: str
) -> None:
    server = serve(**lacking)
    with pytest.raises(ConfigurationError) as raised:
        await using(engine_of(server.url), ServedEngine.require_weights)
    assert option in str(raised.value)
    assert server.url in str(raised.value)
    assert " and the " not in str(raised.value), "nothing else is lacking"


async def test_a_server_of_text_alone_is_refused(serve: Serve) -> None:
    server = serve(tokens=False, token_ids=False)
    with pytest.raises(ConfigurationError, match=r"no token ids.*--enable-scale-out"):
        await using(engine_of(server.url), ServedEngine.ping)


async def test_a_server_elsewhere_does_not_see_the_shared_memory(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    monkeypatch.setattr("tests.fakes.model_server.Path.exists", lambda path: False)
    with pytest.raises(ConfigurationError, match="start it on the machine that trains"):
        await using(engine_of(server.url), ServedEngine.require_weights)


async def test_a_server_elsewhere_sees_files_of_a_shared_directory(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server, require = serve(), partial(ServedEngine.require_weights, directory=tmp_path)
    await using(engine_of(server.url), require)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("tests.fakes.model_server.Path.exists", lambda path: False)
    with pytest.raises(ConfigurationError, match=r"point --ckpt\.output_dir to a file system"):
        await using(engine_of(server.url), require)


async def test_a_server_that_guesses_ahead_is_refused(serve: Serve) -> None:
    server = serve(guesses={"method": "ngram", "num_speculative_tokens": 3})
    with pytest.raises(ConfigurationError, match=r"guesses tokens ahead.*start it without --speculative-config"):
        await using(engine_of(server.url), ServedEngine.require_weights)


@pytest.mark.parametrize("quantization", [None, "fp8"])
async def test_a_server_that_quantises_is_named_with_what_corrects_for_it(
    serve: Serve, quantization: str | None
) -> None:
    server = serve(quantization=quantization)
    with capture_logs() as logs:
        await using(engine_of(server.url), ServedEngine.require_weights)
    told = [line for line in logs if "--algo.correction.level token" in line["event"]]
    assert [(line["server"], line["by"]) for line in told] == [(server.url, "fp8")] * (quantization is not None)


async def test_a_server_that_is_not_ready_lacks_nothing(serve: Serve) -> None:
    server = serve()
    server.starting = True
    with pytest.raises(EngineError, match=r"answered /server_info with 503: starting"):
        await using(engine_of(server.url), ServedEngine.require_weights)


async def test_nobody_there_is_one_sentence(held_port: int) -> None:
    url = f"http://127.0.0.1:{held_port}"
    with pytest.raises(EngineError, match=rf"{url} does not answer: .*\. Check that it runs, and its address\.$"):
        await using(engine_of(url), ServedEngine.ping)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """Records that are logged during a test, by libraries, too."""
    root, handler = logging.getLogger(), logging.handlers.BufferingHandler(capacity=10**6)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler.buffer
    root.removeHandler(handler)
    root.setLevel(level)


async def test_the_token_opens_and_is_told_to_nobody(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    server = serve(token="sesame")
    monkeypatch.setenv(TOKEN_VARIABLE, "sesame")
    await using(engine_of(server.url), ServedEngine.require_weights)
    monkeypatch.setenv(TOKEN_VARIABLE, "wrong-word")
    with pytest.raises(EngineError, match=f"environment variable {TOKEN_VARIABLE}") as raised:
        await using(engine_of(server.url), ServedEngine.ping)
    lines = "\n".join(logging.Formatter().format(record) for record in logged)
    assert server.url in lines, "requests are logged"
    for secret in ("sesame", "wrong-word"):
        assert secret not in str(raised.value) + lines


async def test_what_fails_in_passing_is_asked_again_and_the_rest_is_not(serve: Serve) -> None:
    server = serve()

    async def work(engine: ServedEngine) -> None:
        asked = len(server.bodies)
        server.fails = [503, 429]
        assert len((await engine.generate(ask())).token_ids) == 4
        again = server.bodies[asked:]
        assert len(again) == 3
        assert again[0] == again[1] == again[2]
        server.fails = [400, 503]
        with pytest.raises(EngineError, match="400: not now"):
            await engine.generate(ask())
        assert server.fails == [503]
        server.fails = [503] * 3
        with pytest.raises(EngineError, match="503: not now"):
            await engine.generate(ask())

    await using(engine_of(server.url), work)


@pytest.mark.parametrize("tokens", [True, False], ids=["token ids", "completions"])
async def test_a_streamed_reply_is_heard_while_it_is_sampled_and_is_the_whole_one(serve: Serve, tokens: bool) -> None:
    server = serve(tokens=tokens)
    heard: list[int] = []

    async def work(engine: ServedEngine) -> tuple[Generation, Generation]:
        silent = await engine.generate(ask(top_k=5))
        server.hold.clear()
        task = asyncio.create_task(engine.generate(ask(top_k=5), on_token=heard.append))
        await until(lambda: heard == [100])
        assert not task.done()
        server.hold.set()
        return silent, await task

    silent, streamed = await using(engine_of(server.url), work)
    assert list(streamed.token_ids) == heard == [100, 101, 102, 103]
    for field in ("token_ids", "logprobs", "versions", "stop_reason"):
        assert getattr(streamed, field) == getattr(silent, field)


async def test_a_stream_that_breaks_is_asked_again_and_repeats_no_token(serve: Serve) -> None:
    server = serve()
    heard: list[int] = []

    async def work(engine: ServedEngine) -> None:
        server.breaks = [3, 1]
        assert list((await engine.generate(ask(), on_token=heard.append)).token_ids) == heard == [100, 101, 102, 103]
        server.breaks = [0, 0, 0]
        with pytest.raises(EngineError, match=r"does not answer: .*broke off"):
            await engine.generate(ask(), on_token=heard.append)
        server.fails = [400]
        with pytest.raises(EngineError, match="400: not now"):
            await engine.generate(ask(), on_token=heard.append)
        assert len(heard) == 4

        def hear(token: int) -> None:
            heard.append(token)
            server.shift = 7  # what it samples from now on

        server.breaks = [2]
        with pytest.raises(EngineError, match="sampled other tokens: ask again"):
            await engine.generate(ask(), on_token=hear)
        assert heard[4:] == [100, 101]

    await using(engine_of(server.url), work)
    await until(lambda: server.in_flight == 0)  # the server hears later that nobody listens any more


async def test_a_stream_may_end_with_an_error_or_be_no_stream(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    heard: list[int] = []

    async def work(engine: ServedEngine) -> Generation:
        error = 'data: {"error": {"message": "out of memory", "code": 500}}\n\ndata: [DONE]\n\n'
        monkeypatch.setattr(server, "_streamed", lambda answer: iter([error]))
        with pytest.raises(EngineError, match="answered /inference/v1/generate with an error: out of memory"):
            await engine.generate(ask(), on_token=heard.append)
        monkeypatch.setattr(server, "_streamed", lambda answer: answer)
        return await engine.generate(ask(), on_token=heard.append)

    assert list((await using(engine_of(server.url), work)).token_ids) == heard == [100, 101, 102, 103]


async def test_no_more_requests_at_once_than_the_server_takes(serve: Serve) -> None:
    server = serve()

    async def work(engine: ServedEngine) -> None:
        server.hold.clear()
        tasks = [asyncio.create_task(engine.generate(ask(seed))) for seed in range(6)]
        await until(lambda: server.in_flight == 2)
        server.hold.set()
        await asyncio.gather(*tasks)

    await using(engine_of(server.url, max_requests=2), work)
    assert server.most_in_flight == 2


async def test_a_cancelled_call_frees_its_place(serve: Serve) -> None:
    server = serve()

    async def work(engine: ServedEngine) -> None:
        server.hold.clear()
        first = asyncio.create_task(engine.generate(ask()))
        await until(lambda: server.in_flight == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(engine.generate(ask()))
        await until(lambda: server.in_flight == 2)  # on another connection: the first one was closed
        server.hold.set()
        assert len((await second).token_ids) == 4

    await using(engine_of(server.url, max_requests=1), work)


async def test_an_abort_ends_those_that_wait_for_a_place(serve: Serve) -> None:
    server = serve()

    async def work(engine: ServedEngine) -> list[Generation]:
        await engine.require_weights()
        await engine.generate(ask())  # has told the server its version, which the others need not
        server.hold.clear()
        tasks = [asyncio.create_task(engine.generate(ask(seed))) for seed in range(3)]
        await until(lambda: server.in_flight == 1)
        asked = len(server.paths)
        pausing = asyncio.create_task(engine.pause(PauseMode.ABORT))
        await until(lambda: server.paused)
        assert any("mode=abort" in path for path in server.paths[asked:])
        server.hold.set()
        await pausing
        return await asyncio.gather(*tasks)

    first, *others = await using(engine_of(server.url, max_requests=1), work)
    assert len(first.token_ids) == 4
    assert [one.stop_reason for one in others] == [StopReason.ABORTED] * 2


async def test_a_pause_that_a_run_left_behind_is_ended(serve: Serve) -> None:
    server = serve()
    server.paused = True
    await using(engine_of(server.url), ServedEngine.ping)
    assert not server.paused


async def test_a_lost_server_is_replaced_by_others_and_used_again_when_it_has_the_weights(
    serve: Serve, held_port: int
) -> None:
    lost, other = serve(port=held_port), serve()

    async def scenario() -> None:
        engines = [engine_of(server.url) for server in (lost, other)]
        for engine in engines:
            await engine.ready()
            await engine.require_weights()
        fleet = EngineFleet(engines, bounds=FleetBounds(max_restarts=5), ping_seconds=0.05)
        brought: list[Taker] = []

        async def refresh(taker: Taker) -> None:
            brought.append(taker)
            engines[taker.number].set_version(3)
            fleet.took([taker], 3)

        fleet.refresh = refresh
        fleet.new_weights(3)
        for engine in engines:
            engine.set_version(3)
        fleet.took(await fleet.takers(), 3)
        lost.hold.clear()
        tasks = [asyncio.create_task(fleet.generate(ask(seed))) for seed in range(4)]
        await until(lambda: lost.in_flight == 2)
        lost.close()
        await until(lambda: fleet.health.serving == [1])
        lost.hold.set()
        for generation in await asyncio.gather(*tasks):
            assert list(generation.versions) == [3] * 4
        assert fleet.replayed == 2
        back = serve(port=held_port)
        await until(lambda: fleet.health.serving == [0, 1])
        assert [taker.number for taker in brought] == [0]
        asked = len(back.bodies)
        for generation in await asyncio.gather(*(fleet.generate(ask(seed)) for seed in range(4))):
            assert list(generation.versions) == [3] * 4
        assert len(back.bodies) > asked
        await fleet.aclose()

    async with asyncio.timeout(SECONDS):
        await scenario()


ODD: list[Any] = [None, 3, "x", [], [[]], {}, {"data": [3]}, {"vllm_config": []}, {"vllm_config": {"model_config": {}}}]
ODD_CHOICES: list[Any] = [
    {"finish_reason": []},
    {"finish_reason": "length", "token_ids": 3, "logprobs": "x"},
    {"finish_reason": "length", "token_ids": [1], "logprobs": {"content": [{}]}, "weight_versions": [3]},
    {"finish_reason": "length", "token_ids": [1], "logprobs": {"content": [{"logprob": 0}]}, "weight_versions": "x"},
]


@pytest.mark.parametrize("path", ["/v1/models", "/is_paused", "/server_info", "/inference/v1/generate"])
@pytest.mark.parametrize("odd", [*ODD, *({"choices": [choice]} for choice in ODD_CHOICES)], ids=repr)
async def test_whatever_a_server_answers_is_one_sentence(
    path: str, odd: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, told = serve(), ServerClient.ask

    async def ask_oddly(client: ServerClient, asked: str, *arguments: Any, **options: Any) -> tuple[int, Any]:
        return (200, odd) if asked.startswith(path) else await told(client, asked, *arguments, **options)

    monkeypatch.setattr(ServerClient, "ask", ask_oddly)

    async def work(engine: ServedEngine) -> None:
        await engine.require_weights()
        await engine.generate(ask())

    if path == "/is_paused":
        await using(engine_of(server.url), work)  # none of them says that it is
        return
    with pytest.raises((ConfigurationError, EngineError), match=r"^[^\n]+$"):
        await using(engine_of(server.url), work)


async def test_json_that_nobody_can_read_is_text(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx2.Response, "json", lambda response: deep(response))

    async def work(client: ServerClient) -> tuple[int, Any]:
        return await client.ask("/v1/models")

    def deep(value: Any) -> Any:
        return deep(value)

    status, answer = await work(ServerClient(serve().url))
    assert status == 200
    assert isinstance(answer, str)


ENDLESS = {"choices": [{"index": 0, "token_ids": [1], "logprobs": {"content": [{"logprob": 0.0}]}}]}


class Endless(BaseHTTPRequestHandler):
    """Answers every path without end, as its first part says."""

    asked: list[str]

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        kind = "application/json" if self.path == "/whole" else "text/event-stream"
        self.send_header("Content-Type", kind)
        self.end_headers()
        part = f"data: {json.dumps(ENDLESS)}\n\n" if self.path.startswith("/inference") else "data: 1" * 1000
        with suppress(OSError):
            while True:
                self.wfile.write(part.encode())

    def log_message(self, *words: object) -> None:
        """Says nothing."""


@pytest.fixture
def endless() -> Iterator[tuple[str, list[str]]]:
    handler = type("Handler", (Endless,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.asked
        server.shutdown()


@pytest.mark.parametrize(("path", "times"), [("/whole", 1), ("/said_to_be_events", 1), ("/event", 3)])
async def test_an_answer_without_end_is_given_up(path: str, times: int, endless: tuple[str, list[str]]) -> None:
    url, asked = endless
    client = ServerClient(url)
    if path == "/event":
        asking: Coroutine[Any, Any, Any] = client.stream(path, {}, lambda: lambda event: None)
    else:
        asking = client.ask(path, {}, repeat=True)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(EngineError, match="more than 16,777,216 bytes"):
            await asking
    assert len(asked) == times
    await client.aclose()


async def test_tokens_that_are_streamed_without_end_are_given_up(endless: tuple[str, list[str]]) -> None:
    url, _ = endless
    core = ServedCore(url, vocabulary=10, max_requests=1, flag="rollout.server_urls")
    heard: list[int] = []
    async with asyncio.timeout(SECONDS):
        with pytest.raises(EngineError, match="streams more than the 3 tokens that it was asked for"):
            await core.sample("r", ask(max_new_tokens=3), frozenset(), heard.append)
    assert heard == [1, 1, 1]
    await core.http.aclose()


@pytest.mark.parametrize("forms", ["auto", "guidance", "xgrammar"])
async def test_a_server_in_training_follows_forms_as_the_trainer_does(serve: Serve, forms: str) -> None:
    async def work(engine: ServedEngine) -> None:
        await engine.require_weights()
        assert (await engine.generate(ask())).token_ids
        if forms == "xgrammar":
            with pytest.raises(DataError, match=r"by xgrammar, .* without --structured-outputs-config"):
                await engine.generate(ask(grammar="start: /a/"))
        else:
            assert (await engine.generate(ask(grammar="start: /a/"))).token_ids

    await using(engine_of(serve(forms=forms).url), work)


def test_grammars_and_likely_tokens_go_by_vllms_own_endpoint_alone() -> None:
    asked = ask(grammar="start: /a/", top_logprobs=2)
    params = TokensWire().body("r", asked, frozenset())["sampling_params"]
    assert (params["structured_outputs"], params["logprobs"]) == ({"grammar": "start: /a/"}, 3)
    most = TokensWire().body("r", ask(top_logprobs=20), frozenset())["sampling_params"]
    assert most["logprobs"] == 20, "vLLM's server refuses more"
    assert "structured_outputs" not in TokensWire().body("r", ask(), frozenset())["sampling_params"]
    tops = [{"token_id": 7, "logprob": -2.0}, {"token_id": 8, "logprob": -9999.0}, {"token_id": 9, "logprob": -0.5}]
    content = [{"token_id": 7, "logprob": -2.0, "top_logprobs": tops}]
    spans = [{"version": "3", "start": 0, "end": 1}]
    choice = {"finish_reason": "stop", "token_ids": [7], "logprobs": {"content": content}, "weight_versions": spans}
    assert TokensWire().read({"choices": [choice]}, 0).top_logprobs == [[(9, -0.5), (7, -2.0)]]
    with pytest.raises(DataError, match="follow no grammar"):
        CompletionsWire("m").body("r", asked, frozenset())
