"""`rollgrad serve reward` from end to end: the real server, the real client, the real command line."""

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from attrs import frozen

from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.adapters.rewards.http import TOKEN_VARIABLE as CLIENT_TOKEN_VARIABLE
from rollgrad.adapters.rewards.http import HttpReward
from rollgrad.adapters.servers.reward_server import ROUND_TEXTS, ScoreQueue, create_reward_app
from rollgrad.adapters.servers.server import TOKEN_VARIABLE, Server
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import RewardError
from rollgrad.entrypoints.cli.main import main

STOP_SECONDS = 200.0


@frozen
class Text:
    text: str
    truncated: bool = False


class FakeScorer:
    """A text's score is its length. It waits for `free` before each round; `rounds` has what it was asked."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.busy = threading.Event()
        self.rounds: list[list[str]] = []

    def encode(self, text: str) -> Text:
        if text == "poison":
            raise ValueError("the secret detail")
        return Text(text, truncated="long" in text)

    def score_encoded(self, texts: Sequence[Text]) -> list[float]:
        self.rounds.append([each.text for each in texts])
        self.busy.set()
        assert self.free.wait(STOP_SECONDS)
        return [float("nan") if each.text == "nan" else float(len(each.text)) for each in texts]

    def hold(self) -> None:
        self.free.clear()
        self.busy.clear()


@pytest.fixture
def scorer() -> FakeScorer:
    return FakeScorer()


Scenario = Callable[[httpx2.AsyncClient, ScoreQueue], Awaitable[Any]]


async def serve(scorer: Any, scenario: Scenario, *, capacity: int = 4096, token: str | None = None) -> Any:
    """Runs `scenario` with a client of a server of its own."""

    queue = ScoreQueue(scorer, capacity=capacity)
    server = Server(create_reward_app(queue, model="tiny"), token=token, name="reward server")
    url = await server.start()
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=None) as client:
            return await scenario(client, queue)
    finally:
        if isinstance(scorer, FakeScorer):
            scorer.free.set()
        await server.stop()
        queue.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def ask(query: list[str]) -> dict[str, Any]:
    return {"query": query, "prompts": ["x"] * len(query), "labels": [None] * len(query)}


@pytest.fixture(scope="module")
def reward_model(reward_model_dir: Path) -> RewardModel:
    return RewardModel.load(str(reward_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="--model")


def request(response: str) -> RewardRequest:
    prompt = Prompt(token_ids=(1,), text="What is 3 plus 4? ", label="7")
    return RewardRequest(prompt=prompt, response=response, stop_reason=StopReason.STOP)


async def by_client(url: str, responses: Sequence[str], **options: Any) -> list[Reward]:
    source = HttpReward([url], timeout=STOP_SECONDS, **options)
    try:
        found = await asyncio.gather(*(source.score([request(response)]) for response in responses))
    finally:
        await source.aclose()
    return [reward for (reward,) in found]


@pytest.mark.parametrize("path", ["", "/", "/get_reward"])
async def test_two_hundred_requests_each_get_their_own_answer(reward_model: RewardModel, path: str) -> None:
    responses = [f"The answer is {n * n}. " + "so " * (n % 40) for n in range(200)]
    expected = [reward_model.score([request(response).query])[0] for response in responses]

    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> list[Reward]:
        return await by_client(f"{client.base_url}".rstrip("/") + path, responses, batch_size=1)

    rewards = await serve(reward_model, scenario)
    assert [reward.value for reward in rewards] == pytest.approx(expected, abs=1e-5)
    assert [reward.score for reward in rewards] == [reward.value for reward in rewards]
    assert len({round(value, 4) for value in expected}) > 150, "answers that are alike would show nothing"
    assert {reward.metrics["query_truncated"] for reward in rewards} == {0.0, 1.0}


async def test_the_client_sends_its_token(scorer: FakeScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> None:
        monkeypatch.setenv(CLIENT_TOKEN_VARIABLE, "wrong")
        with pytest.raises(RewardError, match=r"refuses its callers \(401"):
            await by_client(f"{client.base_url}", ["a"])
        monkeypatch.setenv(CLIENT_TOKEN_VARIABLE, "secret")
        (reward,) = await by_client(f"{client.base_url}", ["a"])
        assert reward.value == len(request("a").query)
        assert (await client.get("/health")).json() == {"status": "ok", "model": "tiny", "queued": 0}

    await serve(scorer, scenario, token="secret")


async def test_the_answer_is_openrlhf_s(scorer: FakeScorer) -> None:
    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> None:
        whole = await client.post("/get_reward", json=ask(["abc", "a long one"]))
        assert whole.status_code == 200
        assert whole.json() == {
            "rewards": [3.0, 10.0],
            "scores": [3.0, 10.0],
            "extra_logs": {"query_truncated": [0.0, 1.0]},
        }
        only_query = await client.post("/get_reward", json={"query": ["abc"], "prompts": None})
        assert only_query.json()["rewards"] == [3.0]

    await serve(scorer, scenario)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "query must be a list of texts"),
        ({"query": "text"}, "query must be a list of texts"),
        ({"query": []}, "at least one"),
        ({"query": ["a", 7]}, "query[1] is not a text"),
        ({"query": ["a", ""]}, "query[1] is empty"),
        ({"query": ["a"], "prompts": ["a", "b"]}, "prompts must be a list as long as query (1)"),
        ({"query": ["a"], "prompts": "a"}, "prompts must be a list"),
        ({"query": ["a"], "prompts": [None]}, "prompts[0] is not a text"),
        ({"query": ["a"], "labels": []}, "labels must be a list as long as query (1)"),
        ({"query": ["a"] * 9}, "query has 9 texts; at most 8 fit a request"),
    ],
)
async def test_requests_that_break_the_protocol_are_400s(
    scorer: FakeScorer, body: dict[str, Any], message: str
) -> None:
    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> None:
        response = await client.post("/get_reward", json=body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]

    await serve(scorer, scenario, capacity=8)
    assert scorer.rounds == []


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"junk", 400), (b'{"query":' + b"[" * 100_000, 400), (b'{"query":["' + b"x" * (17 * 2**20) + b'"]}', 413)],
    ids=["junk", "deep", "oversized"],
)
async def test_bodies_that_are_refused(scorer: FakeScorer, content: bytes, status: int) -> None:
    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> None:
        response = await client.post("/get_reward", content=content)
        assert response.status_code == status
        assert response.json()["error"]["message"]
        assert (await client.post("/get_reward", json=ask(["a"]))).status_code == 200

    await serve(scorer, scenario)


async def test_what_waits_together_is_scored_together(scorer: FakeScorer) -> None:
    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> None:
        scorer.hold()
        first = asyncio.create_task(client.post("/", json=ask(["first"])))
        await until(scorer.busy.is_set)
        bodies = [ask(["x" * n, "x" * (n + 100)]) for n in range(1, 11)]
        others = [asyncio.create_task(client.post("/", json=body)) for body in bodies]
        await until(lambda: queue.waiting == 20)
        assert (await client.get("/health")).json()["queued"] == 20
        scorer.free.set()
        await first
        answers = [response.json()["rewards"] for response in await asyncio.gather(*others)]
        assert answers == [[n, n + 100] for n in range(1, 11)]
        assert [len(texts) for texts in scorer.rounds] == [1, 20]

    await serve(scorer, scenario)


async def test_a_large_request_is_scored_whole_and_delays_nobody_else_s_round(scorer: FakeScorer) -> None:
    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> None:
        scorer.hold()
        jobs = [queue.submit(["x"])]
        await until(scorer.busy.is_set)
        jobs += [queue.submit(["x"] * count) for count in (ROUND_TEXTS - 1, 2, ROUND_TEXTS + 1, 1)]
        scorer.free.set()
        for job in jobs:
            assert job is not None
            await asyncio.wrap_future(job.answer)
        assert [len(texts) for texts in scorer.rounds] == [1, ROUND_TEXTS - 1, 2, ROUND_TEXTS + 1, 1]

    await serve(scorer, scenario)


async def test_a_full_queue_is_a_429_and_then_recovers(scorer: FakeScorer) -> None:
    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> None:
        scorer.hold()
        first = asyncio.create_task(client.post("/", json=ask(["first"])))
        await until(scorer.busy.is_set)
        second = asyncio.create_task(client.post("/", json=ask(["a", "b", "c"])))
        await until(lambda: queue.waiting == 3)
        refused = await client.post("/", json=ask(["d", "e"]))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "queue_full"
        by_patience = asyncio.create_task(by_client(f"{client.base_url}", ["d", "e"]))
        fits = asyncio.create_task(client.post("/", json=ask(["f"])))
        await until(lambda: queue.waiting == 4)
        scorer.free.set()
        assert [response.status_code for response in await asyncio.gather(first, second, fits)] == [200, 200, 200]
        assert [reward.value for reward in await by_patience] == [len(request("d").query)] * 2

    await serve(scorer, scenario, capacity=4)


async def test_who_hangs_up_before_its_turn_gives_its_place_back(scorer: FakeScorer) -> None:
    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> None:
        scorer.hold()
        first = asyncio.create_task(client.post("/", json=ask(["first"])))
        await until(scorer.busy.is_set)
        leaver = asyncio.create_task(client.post("/", json=ask(["leaver"])))
        await until(lambda: queue.waiting == 1)
        leaver.cancel()
        await until(lambda: queue.waiting == 0)
        scorer.free.set()
        assert (await first).status_code == 200
        assert (await client.post("/", json=ask(["next"]))).status_code == 200
        assert scorer.rounds == [["first"], ["next"]]

    await serve(scorer, scenario)


async def test_who_hangs_up_during_its_turn_disturbs_nobody(scorer: FakeScorer) -> None:
    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> None:
        scorer.hold()
        leaver = asyncio.create_task(client.post("/", json=ask(["leaver"])))
        await until(scorer.busy.is_set)
        leaver.cancel()
        await asyncio.wait([leaver])
        scorer.free.set()
        assert (await client.post("/", json=ask(["next"]))).json()["rewards"] == [4.0]

    await serve(scorer, scenario)


async def test_a_text_that_breaks_the_model_fails_alone(scorer: FakeScorer) -> None:
    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> None:
        scorer.hold()
        first = asyncio.create_task(client.post("/", json=ask(["first"])))
        await until(scorer.busy.is_set)
        others = [asyncio.create_task(client.post("/", json=ask([text]))) for text in ("good", "poison", "nan")]
        await until(lambda: queue.waiting == 3)
        scorer.free.set()
        await first
        good, poison, nan = await asyncio.gather(*others)
        assert good.json()["rewards"] == [4.0]
        assert poison.status_code == 500
        assert "secret" not in poison.text
        assert nan.status_code == 422
        assert "query[0] is nan" in nan.json()["error"]["message"]

    await serve(scorer, scenario)


async def test_a_queue_that_closes_tells_those_who_wait(scorer: FakeScorer) -> None:
    async def scenario(client: httpx2.AsyncClient, queue: ScoreQueue) -> None:
        scorer.hold()
        first = asyncio.create_task(client.post("/", json=ask(["first"])))
        await until(scorer.busy.is_set)
        waiter = asyncio.create_task(client.post("/", json=ask(["waiter"])))
        await until(lambda: queue.waiting == 1)
        closing = asyncio.create_task(asyncio.to_thread(queue.close))
        assert (await waiter).status_code == 503
        scorer.free.set()
        assert (await first).status_code == 200
        await closing
        assert (await client.post("/", json=ask(["late"]))).status_code == 503

    await serve(scorer, scenario)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--model is not set"),
        ("--model ./missing", "./missing"),
        ("--model m --host 0.0.0.0", "--host is '0.0.0.0', where other machines reach the reward server"),
        ("--model m --token_file missing", "--token_file missing cannot be read"),
        ("--model m --prt 1", "did you mean --port?"),
        ("--model m --token secret", "--token is not a flag"),
        ("--model MODEL --normalize_reward --port 0", "--normalize_reward is set, but config.json of"),
        ("--model MODEL --port TAKEN", "The reward server cannot listen"),
    ],
)
def test_bad_settings_are_one_sentence(
    arguments: str,
    message: str,
    reward_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = arguments.replace("MODEL", str(reward_model_dir)).replace("TAKEN", str(taken.getsockname()[1]))
        assert main(["serve", "reward", *words.split()]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    (error,) = (line for line in printed.err.splitlines() if "level=info" not in line)
    assert error.startswith("error: ")
    assert message in error


@pytest.fixture
def start(rollgrad_command: list[str]) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []

    def begin(*words: str, token: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*rollgrad_command, *words],
            env={**os.environ, TOKEN_VARIABLE: token},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


OURS = "serve reward --dtype float32 --port 0 --model MODEL"
OPENRLHF = "openrlhf --run python3 -m openrlhf.cli.serve_rm --port 0 --max_len 64 --reward_pretrain MODEL"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "number", "status", "precision"),
    [(OURS, signal.SIGINT, 130, 1e-5), (OPENRLHF, signal.SIGTERM, 0, 5e-2)],  # the second in bfloat16, say
    ids=["rollgrad", "openrlhf"],
)
def test_the_command_serves_until_a_signal(
    start: Callable[..., "subprocess.Popen[str]"],
    reward_model: RewardModel,
    reward_model_dir: Path,
    words: str,
    number: signal.Signals,
    status: int,
    precision: float,
) -> None:
    process = start(*words.replace("MODEL", str(reward_model_dir)).split(), token="secret")
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), process.communicate()
    health = httpx2.get(f"{url}/health", timeout=STOP_SECONDS).json()
    assert health == {"status": "ok", "model": "tiny-reward-model", "queued": 0}
    assert httpx2.post(f"{url}/get_reward", json=ask(["a"]), timeout=STOP_SECONDS).status_code == 401
    asked = {"query": ["The answer is 7."], "prompts": ["The answer is"], "labels": ["7"]}
    headers = {"x-api-key": "secret"}
    answer = httpx2.post(f"{url}/get_reward", json=asked, headers=headers, timeout=STOP_SECONDS).json()
    assert answer["rewards"] == pytest.approx(reward_model.score(["The answer is 7."]), abs=precision)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=STOP_SECONDS)
    assert process.returncode == status, stderr
    assert stdout == "", "the address is the only line"
    assert "Traceback" not in stderr
    assert f"url={url}" in stderr
    assert "secret" not in stderr
