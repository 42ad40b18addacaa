"""Services go on, and their callers hear within the deadline, whatever is raised wherever a service calls something.

Each test counts the calls of one place in a run without a fault, then plays the same run once for each of them and each
kind of fault.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from rollgrad.adapters.engines.embedded import batch, rows
from rollgrad.adapters.engines.embedded.batch import Batch
from rollgrad.adapters.engines.embedded.decoding import Decoder
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.kept import KeptSequences
from rollgrad.adapters.engines.embedded.kv_cache import KVCache
from rollgrad.adapters.engines.embedded.rows import Row
from rollgrad.adapters.environments.episode_thread import EpisodeThread
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.rewards import http as http_reward
from rollgrad.adapters.rewards import posting
from rollgrad.adapters.rewards.answers import RewardParser
from rollgrad.adapters.rewards.http import HttpReward
from rollgrad.adapters.rewards.model import ModelReward
from rollgrad.adapters.rewards.posting import JudgeServers
from rollgrad.adapters.servers.agent_server import AgentServer
from rollgrad.adapters.servers.guard import Guard
from rollgrad.adapters.servers.reward_server import ScoreQueue, create_reward_app
from rollgrad.adapters.servers.server import Server
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.errors import EngineError, RewardError, RollgradError
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.testing.chat_codec import EOS, FakeChatCodec
from tests.fakes.fleet_member import FakeFleetMember
from tests.fakes.reward_server import RewardServer
from tests.fakes.scripted_engine import ScriptedEngine, serving

DEADLINE = 120.0
"""Seconds for a whole scenario: far more than any takes, so that only a wait for nobody reaches it."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(DEADLINE)]


class UnspeakableError(BaseException):
    """No Exception, and nobody can say what it is."""

    def __str__(self) -> str:
        raise ValueError("not even this")


FAULTS: list[Callable[[], BaseException]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory"),
    lambda: SystemExit(3),
    lambda: StopIteration(),
    lambda: UnspeakableError(),
    lambda: asyncio.CancelledError(),
]
NAMES = ["cuda_memory", "exit", "stop_iteration", "unspeakable", "cancelled"]
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=NAMES)


class Trap:
    """Stands in for `place.name`; raises `fault()` at call number `at` (from 0), and counts calls."""

    def __init__(self, patch: pytest.MonkeyPatch, place: Any, name: str) -> None:
        self.calls = 0
        self.at = -1
        self.fault: Callable[[], BaseException] = FAULTS[0]
        real = getattr(place, name)
        trap = self

        def count() -> None:
            trap.calls += 1
            if trap.calls - 1 == trap.at:
                raise trap.fault()

        def called(*arguments: Any, **options: Any) -> Any:
            count()
            return real(*arguments, **options)

        async def awaited(*arguments: Any, **options: Any) -> Any:
            count()
            return await real(*arguments, **options)

        patch.setattr(place, name, awaited if inspect.iscoroutinefunction(real) else called)

    def arm(self, fault: Callable[[], BaseException], at: int) -> None:
        self.calls, self.at, self.fault = 0, at, fault


async def outcomes(calls: Sequence[Awaitable[Any]], *allowed: type[Exception]) -> list[bool]:
    """Returns whether each call succeeded; those that did not, raised one of rollgrad's errors that tells something."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            assert isinstance(result, allowed), repr(type(result))
            assert str(result) or Exception in allowed
    return [not isinstance(result, BaseException) for result in results]


def sampled(number: int, begin: Sequence[int] = ()) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=2 + number % 3, seed=number, stop_strings=("never said",))
    return GenerationRequest(prompt_token_ids=(*begin, 10 + number // 2, 11, 12), params=params, keep=True)


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="--model")


ENGINE_PLACES = [
    *((Decoder, name) for name in ("prefill", "extend", "step")),
    *((KVCache, name) for name in ("reserve", "free", "copy_out", "copy_in")),
    *((KeptSequences, name) for name in ("take", "keep")),
    (batch, "sample"),
    (rows, "Generation"),
    (Batch, "_stop_reason"),
    (Row, "tell"),
]


@each_fault
@pytest.mark.parametrize(("place", "name"), ENGINE_PLACES, ids=[name for _, name in ENGINE_PLACES])
async def test_the_embedded_engine(
    model: Any, fault: Callable[[], BaseException], place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = Trap(monkeypatch, place, name)
    engine = EmbeddedEngine(model, eos_token_ids=(), max_batch_size=3, decode=lambda ids: "text")

    async def play() -> list[Generation]:
        first = await asyncio.gather(*(engine.generate(sampled(n)) for n in range(5)))
        begun = [(*sampled(n).prompt_token_ids, *first[n].token_ids) for n in range(2)]
        return [*first, *await asyncio.gather(*(engine.generate(sampled(n, b)) for n, b in enumerate(begun)))]

    async def faulty() -> list[bool]:
        first = await outcomes([engine.generate(sampled(n)) for n in range(5)], EngineError)
        return first + await outcomes([engine.generate(sampled(n, (20, 21))) for n in range(2)], EngineError)

    expected = [g.token_ids for g in await play()]
    calls = trap.calls
    assert calls, "the scenario reaches the place"
    for at in sorted({0, calls // 2}):
        engine.set_version(engine.version)  # which forgets what was kept
        trap.arm(fault, at)
        await faulty()
        if trap.calls > at:
            trap.arm(fault, -1)
            assert [g.token_ids for g in await play()] == expected, "it goes on as if nothing had been"


@each_fault
async def test_a_listener_of_the_embedded_engine(model: Any, fault: Callable[[], BaseException]) -> None:
    engine = EmbeddedEngine(model, eos_token_ids=(), decode=lambda ids: "text")

    def listen(token: int) -> None:
        raise fault()

    assert (await outcomes([engine.generate(sampled(0), on_token=listen), engine.generate(sampled(1))], Exception)) == [
        False,
        True,
    ]


def asked(number: int) -> RewardRequest:
    return RewardRequest(prompt=Prompt(token_ids=(1,), text="Say:"), response="x" * number, stop_reason=StopReason.STOP)


REWARD_PLACES = [
    (JudgeServers, "ask"),
    (JudgeServers, "_next_server"),
    (JudgeServers, "_http"),
    (httpx2.AsyncClient, "post"),
    (httpx2.Response, "json"),
    (RewardParser, "parse_each"),
    (RewardParser, "_numbers"),
    (http_reward, "evolve"),
]


@pytest.fixture(scope="module")
def reward_server() -> Iterator[RewardServer]:
    server = RewardServer(lambda body: (200, {"rewards": [float(len(q)) for q in body["query"]]}))
    yield server
    server.close()


@each_fault
@pytest.mark.parametrize(("place", "name"), REWARD_PLACES, ids=[name for _, name in REWARD_PLACES])
async def test_the_client_of_reward_servers(
    fault: Callable[[], BaseException],
    place: Any,
    name: str,
    reward_server: RewardServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(posting, "BACKOFF", 0.001)
    trap = Trap(monkeypatch, place, name)
    for failure_value in (None, -1.0):
        if place is http_reward and failure_value is None:
            continue
        source = HttpReward([reward_server.url], timeout=DEADLINE / 2, batch_size=2, failure_value=failure_value)
        trap.arm(fault, 1)

        async def play(source: HttpReward = source) -> list[bool]:
            try:
                first = await outcomes([source.score([asked(n)]) for n in range(1, 6)], RewardError)
                trap.at = -1
                assert all(await outcomes([source.score([asked(n)]) for n in range(1, 4)]))
                return first
            finally:
                await source.aclose()

        first = await play()
        assert trap.calls > 1, "the scenario reaches the place"
        assert any(first), "the other batches have their rewards"


async def test_closing_ends_waits_for_rewards() -> None:
    hang = threading.Event()
    server = RewardServer(lambda body: (200, {"rewards": [0.0]}) if hang.wait(DEADLINE) else (500, ""))

    async def play() -> BaseException | None:
        source = HttpReward([server.url], timeout=10 * DEADLINE, batch_size=1)
        waits = [asyncio.ensure_future(source.score([asked(n)])) for n in range(3)]
        await asyncio.sleep(0.1)
        await source.aclose()
        await asyncio.wait(waits)
        return None if all(wait.cancelled() for wait in waits) else AssertionError("a wait went on")

    try:
        assert await play() is None
    finally:
        hang.set()
        server.close()


class Scorer:
    """The length of a text, by way of two methods that may be told to raise."""

    def encode(self, text: str) -> Any:
        return text if isinstance(text, Seen) else Seen(text)

    def score_encoded(self, texts: Sequence[Any]) -> list[float]:
        return [float(len(text)) for text in texts]


class Seen(str):
    """A text as the scorer reads it."""

    truncated = False


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(pytest.param("encode", fault, id=f"encode-{name}") for name, fault in zip(NAMES, FAULTS, strict=True)),
        *(pytest.param("score_encoded", fault, id=name) for name, fault in zip(NAMES, FAULTS, strict=True)),
        pytest.param("score_encoded", None, id="one score too many"),
    ],
)
async def test_the_reward_server(
    name: str, fault: Callable[[], BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = Scorer()
    real = getattr(scorer, name)

    def poisoned(given: Any) -> Any:
        if "poison" not in given:
            return real(given)
        if fault is None:
            return [1.0] * (len(given) + 1)
        raise fault()

    monkeypatch.setattr(scorer, name, poisoned)

    async def play() -> list[int]:
        queue = ScoreQueue(scorer)
        server = Server(create_reward_app(queue, model="m"), name="reward server")
        url = await server.start()
        try:
            async with httpx2.AsyncClient(base_url=url, timeout=DEADLINE, verify=False) as http:
                texts = ["good", "poison", "fine", "poison", "well"]
                answers = await asyncio.gather(*(http.post("/", json={"query": [text]}) for text in texts))
                after = await http.post("/", json={"query": ["again"]})
                return [answer.status_code for answer in (*answers, after)]
        finally:
            await server.stop()
            queue.close()

    assert await play() == [200, 500, 200, 500, 200, 200]


@each_fault
async def test_a_reward_model(fault: Callable[[], BaseException]) -> None:
    def judge(replies: Sequence[Any]) -> list[tuple[float, bool]]:
        if any(reply.text == "Say:" for reply in replies):
            raise fault()
        return [(float(len(reply.text)), False) for reply in replies]

    source = ModelReward([judge, judge], timeout=DEADLINE / 2)
    first = await outcomes([source.score([asked(0)])], RewardError)
    assert (first + await outcomes([source.score([asked(n)]) for n in range(1, 4)], RewardError)) == [
        False,
        True,
        True,
        True,
    ]


@each_fault
async def test_an_environment_in_its_thread(fault: Callable[[], BaseException]) -> None:
    def fail() -> None:
        raise fault()

    thread = EpisodeThread("The game", timeout=DEADLINE / 2)
    first = await outcomes([thread.call("a step", fail), thread.call("a step", lambda: 1)], Exception)
    await thread.close(fail)
    assert first == [False, True]


CHAT = "/v1/chat/completions"
SERVER_PLACES = [
    *((FakeChatCodec, name) for name in ("render", "encode", "decode", "parse")),
    (ScriptedEngine, "generate"),
    (TokenLedger, "prepare"),
    (TokenLedger, "commit"),
    (AgentServer, "_read_call"),
    (AgentServer, "_decode"),
    (Guard, "_check"),
]


@each_fault
@pytest.mark.parametrize(("place", "name"), SERVER_PLACES, ids=[name for _, name in SERVER_PLACES])
async def test_the_agent_server(fault: Callable[[], BaseException], place: Any, name: str) -> None:
    codec = FakeChatCodec()
    engine = ScriptedEngine(codec, EOS, lambda prompt: "yes")
    body = {"messages": [{"role": "user", "content": "go"}]}

    async def play() -> None:
        async with (
            serving(engine, codec, stateless=True) as served,
            httpx2.AsyncClient(base_url=served.url, timeout=DEADLINE, verify=False) as http,
        ):
            for path in (CHAT, f"/s/{served.session.key}{CHAT}"):
                for streams in (False, True):
                    trap.arm(fault, 0)
                    answer = await http.post(path, json={**body, "stream": streams})
                    assert answer.status_code in (200, 410, 499, 500, 503), answer.text
                    assert answer.status_code != 200 or "error" in answer.text or not trap.calls
                    trap.arm(fault, -1)
                    assert "yes" in (await http.post(path, json=body)).text
            assert served.service.in_flight == 0

    with pytest.MonkeyPatch.context() as patch:
        trap = Trap(patch, place, name)
        await play()


FLEET_PLACES = ["generate", "ping", "pause", "resume", "sleep", "wake", "restart"]


@each_fault
@pytest.mark.parametrize("name", FLEET_PLACES)
async def test_a_fleet_of_engines(fault: Callable[[], BaseException], name: str) -> None:
    members = [FakeFleetMember(), FakeFleetMember()]
    fleet = EngineFleet(
        members, ping_seconds=0.01, call_seconds=DEADLINE, wait_seconds=DEADLINE, restart_seconds=DEADLINE
    )
    with pytest.MonkeyPatch.context() as patch:
        trap = Trap(patch, FakeFleetMember, name)
        trap.arm(fault, 1 if name == "generate" else 0)
        if name == "restart":
            members[0].kill()
        await outcomes([fleet.generate(sampled(n)) for n in range(6)], RollgradError)
        for round_ in (lambda: fleet.pause(PauseMode.WAIT), fleet.sleep, fleet.wake, fleet.resume):
            await outcomes([round_()], RollgradError)
        while not trap.calls:
            await asyncio.sleep(0.01)
        await outcomes([fleet.generate(sampled(n)) for n in range(6)], RollgradError)
    await fleet.aclose()


@each_fault
async def test_what_watches_a_fleet(fault: Callable[[], BaseException]) -> None:
    """An engine that falls silent is found by nobody once the watch is dead: who waits for it learns that."""

    async def play() -> list[bool]:
        member = FakeFleetMember()
        fleet = EngineFleet([member], ping_seconds=0.01, wait_seconds=10 * DEADLINE)
        waits = [asyncio.ensure_future(fleet.generate(sampled(n))) for n in range(2)]
        member.freeze()
        await asyncio.sleep(0)
        with pytest.MonkeyPatch.context() as patch:
            trap = Trap(patch, fleet._watched, "offer")
            trap.arm(fault, 0)
            return await outcomes(waits, EngineError)

    assert await play() == [False, False]
