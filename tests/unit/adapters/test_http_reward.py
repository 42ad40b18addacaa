"""The reward client against real HTTP servers that answer, fail, hang and lie."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from attrs import evolve

from rollgrad.adapters.rewards import posting
from rollgrad.adapters.rewards.http import TOKEN_VARIABLE, HttpReward
from rollgrad.adapters.servers.server import Server
from rollgrad.adapters.system.bounded_answer import ANSWER_BYTES
from rollgrad.domain.control.circuit_breaker import Circuit
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError, RewardError
from tests.fakes.reward_server import Answer, RewardServer

SECONDS = 60.0
"""After which a test has hung."""
SHORT = 1.0
"""Seconds in which a server is asked again and again that never judges."""


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], RewardServer]]:
    servers: list[RewardServer] = []

    def start(answer: Answer) -> RewardServer:
        servers.append(RewardServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def lengths(body: dict[str, Any]) -> tuple[int, Any]:
    replies = [q.removeprefix(p) for q, p in zip(body["query"], body["prompts"], strict=True)]
    return 200, {"rewards": [len(r) for r in replies], "extra_logs": {"words": [len(r.split()) for r in replies]}}


def broken(body: dict[str, Any]) -> tuple[int, Any]:
    return 503, "busy"


def ask(response: str) -> RewardRequest:
    return RewardRequest(
        prompt=Prompt(token_ids=(1,), text="Say:", label={"any": 1}), response=response, stop_reason=StopReason.STOP
    )


async def score(source: HttpReward, *responses: str) -> list[Reward]:
    """Scores each response by a call of its own, as episodes do."""

    try:
        found = await asyncio.gather(*(source.score([ask(response)]) for response in responses))
    finally:
        await source.aclose()
    return [reward for (reward,) in found]


async def test_requests_that_wait_together_travel_together(serve: Callable[[Answer], RewardServer]) -> None:
    server = serve(lengths)
    found = await score(HttpReward([server.url], timeout=SECONDS, batch_size=4), *["x" * i for i in range(1, 11)])
    assert [reward.value for reward in found] == list(range(1, 11))
    assert found[0].metrics == {"words": 1.0}
    assert sorted(len(body["query"]) for body in server.bodies) == [2, 4, 4]
    assert server.bodies[0]["labels"][0] == {"any": 1}
    assert server.bodies[0]["query"][0].startswith("Say:x")


async def test_servers_are_sent_the_text_with_its_special_tokens(serve: Callable[[Answer], RewardServer]) -> None:
    server = serve(lambda body: (200, {"rewards": [1.0]}))

    source = HttpReward([server.url], timeout=SECONDS)
    await source.score([evolve(ask("yes"), query="<user>Say:yes<end_of_turn>")])
    await source.aclose()
    assert server.bodies == [{"query": ["<user>Say:yes<end_of_turn>"], "prompts": ["Say:"], "labels": [{"any": 1}]}]


async def test_several_servers_share_the_work(serve: Callable[[Answer], RewardServer]) -> None:
    def slowly(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.05)
        return lengths(body)

    servers = [serve(slowly), serve(slowly)]
    await score(HttpReward([s.url for s in servers], timeout=SECONDS, batch_size=1), *["x"] * 8)
    assert [len(s.bodies) for s in servers] == [4, 4]
    assert all(body["query"] for s in servers for body in s.bodies), "nobody is asked about nothing"


async def test_a_broken_server_is_left_alone_while_another_works(serve: Callable[[Answer], RewardServer]) -> None:
    bad, good = serve(broken), serve(lengths)
    source = HttpReward([bad.url, good.url], timeout=SECONDS, batch_size=1, circuit=Circuit(limit=2, cooldown=60.0))
    assert [reward.value for reward in await score(source, *["xx"] * 12)] == [2.0] * 12
    assert len(good.bodies) == 12
    assert len(bad.bodies) <= 8, "the first round may reach it, no later one"


async def test_a_server_that_fails_now_and_then_does_not_fill_the_log(
    serve: Callable[[Answer], RewardServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "BACKOFF", 0.01)
    calls = itertools.count()
    server = serve(lambda body: (200 if next(calls) % 2 else 503, lengths(body)[1]))
    source = HttpReward([server.url], timeout=SECONDS, batch_size=1)
    with structlog.testing.capture_logs() as events:
        for _ in range(20):
            await source.score([ask("xx")])
    await source.aclose()
    assert [event["times"] for event in events] == [1, 2, 4, 8, 16]
    assert all("answered 503" in event["reason"] for event in events)


async def test_a_batch_goes_round_before_it_tries_a_server_again(
    serve: Callable[[Answer], RewardServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "BACKOFF", 0.01)
    servers = [serve(broken), serve(broken), serve(broken), serve(broken), serve(lengths)]
    assert (await score(HttpReward([s.url for s in servers], timeout=SECONDS), "abc"))[0].value == 3.0
    assert [len(s.bodies) for s in servers] == [1] * 5


async def test_a_server_that_recovers_is_used_again(serve: Callable[[Answer], RewardServer]) -> None:
    calls = iter([503, 503])
    server = serve(lambda body: (next(calls, 200), lengths(body)[1]))
    source = HttpReward([server.url], timeout=SECONDS, circuit=Circuit(limit=2, cooldown=0.3))
    assert (await score(source, "abc"))[0].value == 3.0
    assert len(server.bodies) == 3


async def test_a_server_is_waited_for_until_the_deadline(
    serve: Callable[[Answer], RewardServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is started again answers 503 meanwhile, which half a dozen attempts meet in a second."""
    monkeypatch.setattr(posting, "BACKOFF", 0.001)
    calls = iter([503] * 8)
    server = serve(lambda body: (next(calls, 200), lengths(body)[1]))
    source = HttpReward([server.url], timeout=SECONDS, circuit=Circuit(cooldown=0.001))
    assert (await score(source, "abc"))[0].value == 3.0
    assert len(server.bodies) == 9


async def test_while_a_server_hangs_another_judges_what_it_was_asked(serve: Callable[[Answer], RewardServer]) -> None:
    release = threading.Event()

    def hang(body: dict[str, Any]) -> tuple[int, Any]:
        release.wait(SECONDS)
        return lengths(body)

    servers = [serve(hang), serve(lengths)]
    source = HttpReward(
        [s.url for s in servers], timeout=2 * SHORT, batch_size=1, circuit=Circuit(limit=2, cooldown=SECONDS)
    )
    assert [reward.value for reward in await score(source, *["xx"] * 6)] == [2.0] * 6
    asked = len(servers[0].bodies)
    assert asked >= 2
    assert [reward.value for reward in await score(source, *["xx"] * 6)] == [2.0] * 6
    assert len(servers[0].bodies) == asked, "it is left alone then"
    release.set()


async def test_the_deadline_holds_against_a_server_that_hangs(serve: Callable[[Answer], RewardServer]) -> None:
    release = threading.Event()

    def hang(body: dict[str, Any]) -> tuple[int, Any]:
        release.wait(SECONDS)
        return lengths(body)

    server = serve(hang)
    with pytest.raises(RewardError, match=r"No reward server judged 1 reply within 0\.5 s"):
        await score(HttpReward([server.url], timeout=0.5), "x")
    release.set()


async def test_final_failure_is_an_error_or_a_value(
    serve: Callable[[Answer], RewardServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "BACKOFF", 0.01)
    server = serve(broken)
    with pytest.raises(RewardError, match="answered 503"):
        await score(HttpReward([server.url], timeout=SHORT), "x")
    (reward,) = await score(HttpReward([server.url], timeout=SHORT, failure_value=-1.0), "x")
    assert reward == Reward(value=-1.0, metrics={"reward_failed": 1.0})
    (reward,) = await score(HttpReward([serve(lengths).url], timeout=SECONDS, failure_value=-1.0), "x")
    assert (reward.value, reward.metrics) == (1.0, {"words": 1.0, "reward_failed": 0.0})


async def test_a_number_that_is_none_fails_its_own_reply_alone(serve: Callable[[Answer], RewardServer]) -> None:
    server = serve(
        lambda body: (200, {"rewards": [{"2": None, "3": float("nan")}.get(q[-1], 1.0) for q in body["query"]]})
    )
    source = HttpReward([server.url], timeout=SECONDS)
    first, *others = await asyncio.gather(*(source.score([ask(r)]) for r in "123"), return_exceptions=True)
    await source.aclose()
    assert first == [Reward(value=1.0, score=1.0)]
    assert [type(other) for other in others] == [RewardError, RewardError]
    assert "returned the reward nan for reply 1 of 3" in str(others[0])
    filled = await score(HttpReward([server.url], timeout=SECONDS, failure_value=-1.0), "1", "2", "4")
    assert [(reward.value, reward.metrics) for reward in filled] == [
        (1.0, {"reward_failed": 0.0}),
        (-1.0, {"reward_failed": 1.0}),
        (1.0, {"reward_failed": 0.0}),
    ]


async def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "BACKOFF", 0.01)
    with pytest.raises(RewardError, match="ConnectError"):
        await score(HttpReward(["http://127.0.0.1:9/"], timeout=SHORT), "x")


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (404, "no such page", "answered 404 ('no such page')"),
        (401, "who?", "refuses its callers (401, 'who?'): set the environment variable ROLLGRAD_REWARD_TOKEN"),
        (200, "hello", "which is no JSON"),
        pytest.param(200, " " * (ANSWER_BYTES + 1), "has more than 16,777,216 bytes", id="endless"),
        (200, {"scores": [1.0]}, "needs the key 'rewards'"),
        (200, {"rewards": [1.0, 2.0]}, "2 rewards for 1 reply"),
        (200, {"rewards": ["high"]}, "not numbers"),
        (200, {"rewards": [None]}, "finite"),
        (200, '{"rewards": [NaN]}', "finite"),
    ],
)
async def test_what_another_attempt_would_not_change_is_one_sentence(
    serve: Callable[[Answer], RewardServer], status: int, reply: Any, message: str
) -> None:
    server = serve(lambda body: (status, reply))
    with pytest.raises(RewardError) as error:
        await score(HttpReward([server.url], timeout=SECONDS), "x")
    assert message in str(error.value)
    assert server.url in str(error.value)
    assert len(server.bodies) == 1


async def test_a_server_that_sends_its_callers_elsewhere_is_not_followed() -> None:
    """As FastAPI does where a slash at the end is missing; another host would get the token and the replies."""
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append(scope["path"])
        location = [(b"location", b"http://elsewhere/score/")]
        await send({"type": "http.response.start", "status": 307, "headers": location})
        await send({"type": "http.response.body", "body": b""})

    server = Server(app, name="reward server", max_body=2**20)
    await server.start()
    try:
        with pytest.raises(RewardError, match=r"sends its callers to 'http://elsewhere/score/' \(307\): if that"):
            await score(HttpReward([f"{server.url}/score"], timeout=SECONDS), "x")
    finally:
        await server.stop()
    assert heard == ["/score"]


async def test_the_token_travels_in_a_header_only(
    serve: Callable[[Answer], RewardServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "sesame")
    server = serve(lengths)
    await score(HttpReward([server.url], timeout=SECONDS), "x")
    assert server.headers[0]["Authorization"] == "Bearer sesame"
    assert "sesame" not in json.dumps(server.bodies)


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="http://"):
        HttpReward(["localhost:5000"], timeout=1.0)


def test_circuit() -> None:
    circuit = Circuit(limit=2, cooldown=10.0)
    circuit = circuit.failed(0.0)
    assert circuit.allows(0.0)
    circuit = circuit.failed(1.0)
    assert not circuit.allows(10.9)
    assert circuit.allows(11.0)
    trial = circuit.started(11.0)
    assert not trial.allows(12.0), "one trial at a time"
    assert not trial.failed(12.0).allows(21.0)
    assert trial.succeeded() == Circuit(limit=2, cooldown=10.0)
