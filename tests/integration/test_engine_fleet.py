"""Two vLLM engines in Ray actors behind one: what they say is what the trainer computes, also when they are killed."""

import asyncio
import copy
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from attrs import define, evolve, field

from rollgrad.adapters.engines import ray_vllm
from rollgrad.adapters.engines.ray_vllm import RayVLLMEngine, start_engines
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.weights.channel import FleetWeights
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.domain.control.engine_health import Death, FleetBounds
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import ConfigurationError, EngineError, WorkerError
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.composition import cluster as composition
from tests.caught_requests import caught
from tests.contract import test_rollout_engine
from tests.fakes import cluster
from tests.kept_scores import kept_scores
from tests.one_reply import PROMPT, learn, scores
from tests.tiny_models import LONG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FLAG = "--actor.model_name_or_path"

TOLERANCE = 1e-4
"""Largest difference of a log-prob: products are summed in another order, no more."""

SECONDS = 500
"""After which a test has hung: on a busy machine an engine takes more than a minute to start."""

MANY = 16
"""Requests of which each engine has several when one is killed."""


def ask(seed: int = 0, prompt: tuple[int, ...] = PROMPT, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=prompt, params=SamplingParams(**{"max_new_tokens": 24, "seed": seed, **params})
    )


@define
class World:
    """A fleet whose engines and policy have weights of the same `version`, and the loop that it serves."""

    runner: asyncio.Runner
    members: list[RayVLLMEngine]
    fleet: EngineFleet
    channel: FleetWeights
    policy: TorchPolicy
    versions: Iterator[int] = field(factory=lambda: itertools.count(1))
    version: int = 0

    async def begun(self, count: int) -> list[asyncio.Task[Generation]]:
        """Long requests of which each has tokens, whichever engine it has gone to, and none has all of them."""
        while True:
            tasks = await self.asked([ask(seed, max_new_tokens=LONG) for seed in range(count)], *self.members)
            if not any(task.done() for task in tasks):
                return tasks
            await asyncio.gather(*tasks)  # this process, kept from working, heard of them last: asked again

    async def asked(
        self, requests: Sequence[GenerationRequest], *members: RayVLLMEngine
    ) -> list[asyncio.Task[Generation]]:
        """Those that have gone to `members` have tokens: a later request of each of these has been answered."""
        tasks = [asyncio.create_task(self.fleet.generate(request)) for request in requests]
        await asyncio.sleep(0)  # each has an engine
        await asyncio.sleep(0)  # which has been called
        await asyncio.gather(*(member.generate(ask(max_new_tokens=4)) for member in members))
        return tasks

    async def frozen(self, count: int) -> list[asyncio.Task[Generation]]:
        """Requests that a pause has frozen when each had tokens, and none had all of them."""
        return await caught(
            lambda: self.begun(count), lambda: self.fleet.pause(PauseMode.KEEP), lambda: self.fleet.resume()
        )

    def run(self, work: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(SECONDS):
                return await work

        return self.runner.run(bounded())

    async def push(self) -> dict[str, float]:
        self.version = next(self.versions)
        return await self.channel.push(self.policy, self.version)

    async def noticed(self) -> None:
        """An engine that has died between requests is known to have, and another serves in its place."""
        await asyncio.gather(*(self.fleet.generate(ask(seed, max_new_tokens=4)) for seed in range(8)))
        await self.both_serve()

    async def both_serve(self) -> None:
        while self.fleet.health.serving != [0, 1]:
            assert self.fleet.health.failure is None
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def started(ray: None, wide_headed_model_dir: Path) -> Iterator[World]:
    path = str(wide_headed_model_dir)
    settings = {"model": path, "eos_token_ids": (), "dtype": "float32", "max_batch_size": 64}
    model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    policy = TorchPolicy(model, load_tokenizer(path, flag=FLAG), OptimizerSettings(lr=0.005))  # replies stay diverse
    with asyncio.Runner() as runner:
        members = runner.run(start_engines(2, settings, seconds=SECONDS))
        fleet = EngineFleet(
            members, bounds=FleetBounds(suspect_after=60, dead_after=300, max_restarts=20), ping_seconds=0.5
        )
        yield World(runner, members, fleet, FleetWeights(fleet), policy)
        runner.run(fleet.aclose())


@pytest.fixture
def world(started: World) -> World:
    """Both engines serve."""
    started.run(started.both_serve())
    return started


def actors_of_ray(actor_id: str) -> dict[str, Any]:
    """Returns what Ray knows of an actor."""
    from ray._private.state import actors

    known: dict[str, Any] = actors(actor_id)
    return known


def host_of(member: RayVLLMEngine) -> psutil.Process:
    """The actor's process."""
    return psutil.Process(actors_of_ray(member.actor_id)["Pid"])


def vllm_of(member: RayVLLMEngine) -> list[psutil.Process]:
    """vLLM's own processes, without which the actor lives on."""
    return host_of(member).children(recursive=True)


def kill(member: RayVLLMEngine) -> None:
    """Ends the actor's process as the kernel does when memory runs out."""
    cluster.kill([host_of(member)])


@contextmanager
def standing_still(members: Sequence[RayVLLMEngine]) -> Iterator[tuple[Callable[[], Awaitable[None]], ...]]:
    """Gives two functions: one stops vLLM's processes, which then end no request, the other lets them go on, as they do
    after the block."""
    processes = [process for member in members for process in vllm_of(member)]

    def each(do: Callable[[psutil.Process], None]) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                do(process)

    async def stop() -> None:
        each(psutil.Process.suspend)

    async def go_on() -> None:
        each(psutil.Process.resume)

    try:
        yield stop, go_on
    finally:
        each(psutil.Process.resume)


def agrees(world: World, generation: Generation, prompt: Sequence[int] = PROMPT) -> None:
    """The generation is of the current weights."""
    expected = scores(world.policy, prompt, generation.token_ids)
    assert list(generation.logprobs) == pytest.approx(expected, abs=TOLERANCE)
    assert set(generation.versions) == {world.version}


def test_both_engines_say_what_the_trainer_computes(world: World) -> None:
    async def together() -> list[Generation]:
        return await asyncio.gather(*(world.fleet.generate(ask(s, prompt=(*PROMPT, s))) for s in range(64)))

    assert world.fleet.max_tokens == 512
    for seed, generation in enumerate(world.run(together())):
        assert len(generation.token_ids) == 24
        agrees(world, generation, (*PROMPT, seed))
    for member in world.members:
        agrees(world, world.run(member.generate(ask())))


def test_tokens_are_heard_and_errors_cross_the_process(world: World) -> None:
    heard: list[int] = []
    assert list(world.run(world.fleet.generate(ask(), on_token=heard.append)).token_ids) == heard
    with pytest.raises(ConfigurationError, match=r"513 tokens.*holds 512"):
        world.run(world.fleet.generate(ask(max_new_tokens=510)))
    with pytest.raises(EngineError, match="no prompt tokens"):
        world.run(world.fleet.generate(ask(prompt=())))
    assert world.fleet.health.serving == [0, 1]


@pytest.mark.parametrize("one", [pytest.param(True, marks=pytest.mark.wide), False], ids=["engine", "fleet"])
@pytest.mark.parametrize(
    "promise",
    [
        test_rollout_engine.test_tokens_are_heard_while_they_are_sampled,
        test_rollout_engine.test_a_frozen_reply_repeats_no_token_when_it_goes_on,
        test_rollout_engine.test_replies_are_streamed_side_by_side_and_a_cancelled_one_frees_its_place,
    ],
    ids=lambda promise: promise.__name__.removeprefix("test_"),
)
def test_streams_keep_the_promises_of_every_engine(
    world: World, promise: Callable[[Callable[[], Any]], Awaitable[None]], one: bool
) -> None:
    world.run(promise(lambda: world.members[0] if one else world.fleet))


def test_an_error_of_a_listener_ends_its_reply_alone(world: World) -> None:
    heard: list[int] = []

    def broken(token: int) -> None:
        raise ValueError("no ear")

    async def scenario() -> list[Any]:
        member = world.members[0]
        asked = [ask(seed, max_new_tokens=LONG) for seed in range(2)]
        replies = (member.generate(asked[0], on_token=broken), member.generate(asked[1], on_token=heard.append))
        return list(await asyncio.gather(*replies, return_exceptions=True))

    failed, whole = world.run(scenario())
    assert isinstance(failed, ValueError)
    assert list(whole.token_ids) == heard


@pytest.mark.chaos
@pytest.mark.parametrize(
    "doomed_of",
    [
        pytest.param(lambda member: [host_of(member)], id="actor", marks=pytest.mark.wide),
        pytest.param(vllm_of, id="vllm"),
    ],
)
def test_streams_go_on_elsewhere_and_repeat_no_token_when_their_engine_is_killed(
    world: World, doomed_of: Callable[[RayVLLMEngine], list[psutil.Process]]
) -> None:
    async def scenario(ears: list[test_rollout_engine.Ear]) -> list[Any]:
        tasks = [
            asyncio.create_task(
                world.fleet.generate(ask(seed, prompt=(*PROMPT, seed), max_new_tokens=LONG), on_token=ear.hear)
            )
            for seed, ear in enumerate(ears)
        ]
        for ear in ears:
            await ear.second.wait()
        cluster.kill(doomed_of(world.members[0]))
        return await asyncio.gather(*tasks)

    for _ in range(3):  # a busy machine may kill the engine only after its replies have ended
        ears, replayed = [test_rollout_engine.Ear() for _ in range(MANY)], world.fleet.replayed
        replies = world.run(scenario(ears))
        if moved := world.fleet.replayed > replayed:
            break
        world.run(world.noticed())
    assert moved
    for number, reply in enumerate(replies):
        assert ears[number].tokens == list(reply.token_ids)
        agrees(world, reply, (*PROMPT, number))
    world.run(world.both_serve())


def test_a_cancelled_call_frees_its_place_in_the_other_process(world: World) -> None:
    async def scenario() -> None:
        tasks = [asyncio.create_task(world.fleet.generate(ask(s, max_new_tokens=400))) for s in range(8)]
        await world.fleet.generate(ask(max_new_tokens=2))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await world.fleet.sleep()
        await world.fleet.wake()
        agrees(world, await world.fleet.generate(ask()))

    world.run(scenario())


def test_one_push_reaches_both(world: World) -> None:
    learn(world.policy)
    moved = world.run(world.push())
    assert moved["bytes"] == sum(tensor.nbytes for _, tensor in world.policy.weights())
    for member in world.members:
        agrees(world, world.run(member.generate(ask())))


def test_frozen_requests_go_on_under_the_new_weights_on_both(world: World, wide_headed_model_dir: Path) -> None:
    """With the keys and values that they have."""
    states: list[dict[str, torch.Tensor]] = []

    def note_weights() -> None:
        states.append({name: tensor.clone() for name, tensor in world.policy.weights()})

    async def scenario() -> list[Generation]:
        tasks = await world.frozen(6)
        note_weights()
        learn(world.policy)
        note_weights()
        await world.push()
        await world.fleet.resume()
        return await asyncio.gather(*tasks)

    before = world.version
    for generation in world.run(scenario()):
        assert set(generation.versions) == {before, world.version}
        switch = list(generation.versions).index(world.version)
        kept = kept_scores(wide_headed_model_dir, states, switch, PROMPT, generation.token_ids)
        assert list(generation.logprobs)[switch:] == pytest.approx(kept[switch:], abs=TOLERANCE)


@pytest.mark.chaos
@pytest.mark.parametrize(
    "doomed_of",
    [
        pytest.param(lambda member: [host_of(member)], id="actor"),
        pytest.param(vllm_of, id="vllm", marks=pytest.mark.wide),
    ],
)
def test_all_answers_arrive_when_an_engine_is_killed_and_are_those_of_an_undisturbed_run(
    world: World, doomed_of: Callable[[RayVLLMEngine], list[psutil.Process]]
) -> None:
    requests = [ask(s, prompt=(*PROMPT, s), max_new_tokens=LONG) for s in range(MANY)]

    async def asked() -> list[asyncio.Task[Generation]]:
        return await world.asked(requests, world.members[0])

    async def disturbed_play(doomed: Sequence[psutil.Process]) -> list[Generation]:
        with standing_still(world.members) as (stop, go_on):
            tasks = await caught(asked, stop, go_on)
            cluster.kill(doomed)
        return await asyncio.gather(*tasks)

    async def play() -> list[Generation]:
        return await asyncio.gather(*await asked())

    learn(world.policy)
    world.run(world.push())
    quiet = world.run(play())
    replayed = world.fleet.replayed
    disturbed = world.run(disturbed_play(doomed_of(world.members[0])))
    assert world.fleet.replayed - replayed >= len(requests) // 2
    for request, other in zip(requests, disturbed, strict=True):
        agrees(world, other, request.prompt_token_ids)
    same = [list(one.token_ids) == list(other.token_ids) for one, other in zip(quiet, disturbed, strict=True)]
    assert sum(same) >= len(same) - 1, "rounding, which goes by who is computed together, may turn a draw"
    world.run(world.both_serve())
    agrees(world, world.run(world.members[0].generate(ask())))  # with the weights of the last push, not the checkpoint


class Interrupted(TorchPolicy):
    """Something happens while its weights are read."""

    event: Callable[[], object]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, weight in enumerate(super().weights()):
            if index == 3:
                self.event()
            yield weight


@contextmanager
def interrupted(policy: TorchPolicy, event: Callable[[], object]) -> Iterator[None]:
    policy.__class__ = Interrupted
    policy.event = event  # type: ignore[attr-defined]
    yield
    policy.__class__ = TorchPolicy


async def kill_in_the_middle(member: RayVLLMEngine, work: Awaitable[Any]) -> None:
    """Ends the actor when it has begun `work`, which vLLM cannot finish: it is stopped."""
    host = host_of(member)
    stopped = host.children(recursive=True)
    for process in stopped:
        process.suspend()
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    await member._actor.handle.__ray_ready__.remote()  # it answers in turn: `work` has begun there
    host.kill()
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.resume()
    await task


@pytest.mark.chaos
def test_engines_that_are_killed_in_a_push_take_the_weights_when_they_are_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One as it takes a bucket, the other as it finishes: the push begins again with the first replacement."""
    learn(world.policy)
    deaths = world.fleet.health.deaths.total()
    doomed, finishing = [world.members[1]], world.members[0]
    finish = finishing.finish_weights

    def finish_once(version: int) -> Awaitable[None]:
        monkeypatch.undo()
        return kill_in_the_middle(finishing, finish(version))

    monkeypatch.setattr(finishing, "finish_weights", finish_once)
    with interrupted(world.policy, lambda: doomed and kill(doomed.pop())):
        world.run(world.push())
    assert world.fleet.health.deaths.total() == deaths + 2
    agrees(world, world.run(world.fleet.generate(ask())))
    world.run(world.both_serve())
    for member in world.members:
        agrees(world, world.run(member.generate(ask())))


@pytest.mark.chaos
@pytest.mark.wide
def test_engines_that_are_killed_asleep_and_on_waking_say_nothing_before_they_have_the_weights(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a colocated run's: the push after it waits for the first replacement. Nothing of theirs outlives them."""
    fleet, health, (sleeping, waking) = world.fleet, world.fleet.health, world.members
    wake = waking.wake
    monkeypatch.setattr(waking, "wake", lambda: kill_in_the_middle(waking, wake()))
    family = [process for member in world.members for process in host_of(member).children(recursive=True)]
    assert len(family) >= 2

    async def scenario() -> Generation:
        await fleet.sleep()
        kill(sleeping)
        while health.alive(0):
            await asyncio.sleep(0.1)
        assert health.to_restart == [0], "what starts now would take the memory that models train in"
        asked = asyncio.create_task(fleet.generate(ask()))
        learn(world.policy)
        await fleet.wake()
        assert health.living == []
        await world.push()
        return await asked

    agrees(world, world.run(scenario()))
    _, alive = psutil.wait_procs(family, timeout=300)
    assert not alive
    world.run(world.both_serve())
    for member in world.members:
        agrees(world, world.run(member.generate(ask())))


@pytest.mark.chaos
def test_when_the_trainer_dies_in_a_push_nothing_is_sampled_from_half_a_model(world: World) -> None:
    """Requests that a pause froze end with what the old weights said, new ones wait for the next push."""
    fleet, old, version = world.fleet, copy.deepcopy(world.policy), world.version

    def lose() -> None:
        raise WorkerError("rank 1 died")

    async def scenario() -> tuple[list[Generation], Generation]:
        tasks = await world.frozen(6)
        learn(world.policy)
        with interrupted(world.policy, lose), pytest.raises(WorkerError):
            await world.push()
        await fleet.resume()
        cut = await asyncio.gather(*tasks)
        assert fleet.health.serving == []
        asked = asyncio.create_task(fleet.generate(ask()))
        await world.push()
        return cut, await asked

    cut, asked = world.run(scenario())
    for generation in cut:
        assert generation.stop_reason is StopReason.ABORTED
        assert set(generation.versions) == {version}
        expected = scores(old, PROMPT, generation.token_ids)
        assert list(generation.logprobs) == pytest.approx(expected, abs=TOLERANCE)
    agrees(world, asked)


OF_GENERATE = ("output", "data.prompt_dataset", "rollout.n_samples_per_prompt")
"""Flags that `rollgrad eval` does not have, or not with the same meaning."""


def test_replies_in_files_are_those_of_the_engines(
    world: World, sums_flags: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster has places for the engines alone: Ray has none for the processes of the models that a run trains."""

    class Lent:
        """A member that its borrower does not end."""

        def __init__(self, member: RayVLLMEngine) -> None:
            self.member = member

        def __getattr__(self, name: str) -> Any:
            return getattr(self.member, name)

        async def close(self) -> None:
            pass

    async def lent(count: int, settings: Any, **_: Any) -> Any:
        assert (count, settings["model"]) == (2, sums_flags["actor.model_name_or_path"])
        return list(map(Lent, world.members))

    monkeypatch.setattr(composition, "start_engines", lent)
    asked = ("actor.model_name_or_path", "data.prompt_dataset", "data.label_key", "rollout.max_new_tokens")
    flags = {flag: sums_flags[flag] for flag in asked} | {
        "rollout.engine": "vllm",
        "rollout.n_samples_per_prompt": "2",
        "vllm.num_engines": "2",
        "actor.num_gpus_per_node": "1000",
        "cluster.timeout": "60",
        "output": "replies.jsonl",
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    assert main(["generate", *words, "--logprobs", "--cluster.enable", "--train.colocate_all"]) == 0
    replies = [json.loads(line) for line in Path("replies.jsonl").read_text().splitlines()]
    assert [(reply["row"], reply["sample"]) for reply in replies] == [
        (row, part) for row in range(9) for part in (0, 1)
    ]
    for reply in replies[::5]:
        expected = scores(world.policy, reply["prompt_tokens"], reply["tokens"])
        assert reply["logprobs"] == pytest.approx(expected, abs=TOLERANCE)
    flags |= {"eval.dataset": flags["data.prompt_dataset"], "eval.max_samples": "2", "reward.verifier": "last_number"}
    words = [word for flag, value in flags.items() if flag not in OF_GENERATE for word in (f"--{flag}", value)]
    assert main(["eval", *words, "--cluster.enable", "--train.colocate_all"]) == 0


def test_an_engine_that_cannot_start_says_why(world: World, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"vLLM did not start with .*nothing"):
        world.run(
            start_engines(
                1,
                {"model": str(tmp_path / "nothing"), "eos_token_ids": ()},
                options=[{"num_cpus": 0, "namespace": "beside"}],  # where the world's engines have no names
            )
        )


def test_the_process_of_an_engine_that_stands_still_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process does nothing that it is asked, and `ray.kill` leaves it where it is, if Ray has tried in vain
    to connect to it for long: the replacement would wait for its place for ever."""
    import ray

    async def scenario() -> None:
        engine = RayVLLMEngine(9, {}, options={"num_cpus": 0, "namespace": "beside"})
        starting = asyncio.create_task(engine.ready())
        while engine.process is None:
            await asyncio.sleep(0.05)
        process = psutil.Process(engine.process.pid)
        process.suspend()
        try:
            await engine.close()
            cluster.wait_for(lambda: not cluster.lives(process), "the end of a process that stands still", seconds=60)
        finally:
            cluster.kill([process])
            await asyncio.gather(starting, return_exceptions=True)

    monkeypatch.setattr(ray_vllm, "CLOSE_SECONDS", 5.0)
    with monkeypatch.context() as patched:
        patched.setattr(ray, "kill", lambda *_, **__: None)
        world.run(scenario())


@pytest.mark.chaos
@pytest.mark.wide
def test_an_engine_that_dies_while_it_starts_is_replaced_and_the_others_play(
    world: World, wide_headed_model_dir: Path
) -> None:
    import ray

    settings = {"model": str(wide_headed_model_dir), "eos_token_ids": (), "dtype": "float32", "max_batch_size": 64}
    beside = {"num_cpus": 0, "namespace": "beside"}

    async def killed(name: str) -> None:
        while True:
            with suppress(ValueError, psutil.NoSuchProcess):  # there is no such actor yet, or no process of it
                actor = ray.get_actor(name, namespace="beside")
                if pid := actors_of_ray(actor._actor_id.hex())["Pid"]:
                    psutil.Process(pid).kill()
                    return
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        starting = asyncio.create_task(start_engines(2, settings, options=[beside, beside], seconds=SECONDS))
        await killed("rollgrad-engine-1")
        members = await starting
        assert members[0].not_started is None
        assert "died at starting" in str(members[1].not_started)
        fleet = EngineFleet(members, not_started={1: str(members[1].not_started)}, ping_seconds=0.5)
        assert len((await fleet.generate(ask(1))).token_ids) == 24
        while fleet.health.serving != [0, 1]:
            assert fleet.health.failure is None
            await asyncio.sleep(0.1)
        assert len((await members[1].generate(ask(2))).token_ids) == 24
        await fleet.aclose()

    world.run(scenario())


@pytest.mark.chaos
def test_when_no_restart_is_left_all_who_wait_hear_it(world: World) -> None:
    """The last test: it leaves no engine."""
    health = world.fleet.health
    health.bounds = evolve(health.bounds, max_restarts=0)

    async def scenario() -> None:
        hosts = [host_of(member) for member in world.members]
        with standing_still(world.members) as (stop, go_on):
            tasks = await caught(lambda: world.begun(8), stop, go_on)
            cluster.kill(hosts)
        async with asyncio.timeout(300):
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineError)
                assert "All 2 engines are dead" in str(result)
            with pytest.raises(EngineError, match="All 2 engines are dead"):
                await world.push()

    deaths = health.deaths[Death.FAILED]
    world.run(scenario())
    assert health.deaths[Death.FAILED] == deaths + 2
