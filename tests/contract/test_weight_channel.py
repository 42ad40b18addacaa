"""Promises of every weight channel."""

import asyncio
import importlib.util
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from attrs import evolve
from structlog.testing import capture_logs

from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.weights import CopiedWeights, SharedWeights
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.adapters.weights import channel as channel_module
from rollgrad.adapters.weights.channel import EngineWeights, FleetWeights
from rollgrad.adapters.weights.delta import Changes
from rollgrad.adapters.weights.disk import Disk
from rollgrad.adapters.weights.shared_buckets import Run
from rollgrad.adapters.weights.shared_memory import shared_memory, shared_memory_adapter
from rollgrad.adapters.weights.transfer import Backend, Send, WeightStream
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.engines.fleet_member import Taker
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.control.engine_health import EngineState, FleetBounds
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.models import LossOutput, PolicyModel, TokenScores
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.domain.ports.weight_channel import WeightChannel
from rollgrad.testing.models import FakePolicy
from rollgrad.testing.rollout_engine import FakeRolloutEngine
from rollgrad.testing.weight_channel import FakeWeightChannel
from tests.fakes.group_backend import FakeGroupBackend
from tests.fakes.weight_receiver import FakeWeightReceiver

FLAG = "--actor.model_name_or_path"
pytestmark = pytest.mark.asyncio(loop_scope="session")  # vLLM serves all tests
VLLM = [
    pytest.param(way, marks=pytest.mark.slow)
    for way in ("vllm", "disk", "vllm_changes", "disk_changes")
    if importlib.util.find_spec("vllm")
]
GPU = [
    pytest.param(way, marks=[pytest.mark.slow, pytest.mark.gpu])
    for way, gpus in (("cuda_ipc", 1), ("divided_cuda_ipc", 2), ("nccl", 3))
    if importlib.util.find_spec("vllm") and torch.cuda.device_count() >= gpus
]
Parts = tuple[WeightChannel, Any, PolicyModel]
REQUEST = GenerationRequest(prompt_token_ids=(65, 66), params=SamplingParams(max_new_tokens=100))


class AdaptedPolicy(FakePolicy):
    """All that is trained is an adapter."""

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().weights()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("the adapter alone is wanted")


@pytest_asyncio.fixture(loop_scope="session")
async def cuda_ipc(wide_headed_model_dir: Path) -> AsyncIterator[Parts]:
    from tests.fakes.gpu_weights import within_a_gpu

    async with within_a_gpu(wide_headed_model_dir) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def nccl(wide_headed_model_dir: Path) -> AsyncIterator[Parts]:
    from tests.fakes.gpu_weights import between_gpus

    async with between_gpus(wide_headed_model_dir) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def divided_cuda_ipc(wide_headed_model_dir: Path) -> AsyncIterator[Parts]:
    from tests.fakes.gpu_weights import within_two_gpus

    async with within_two_gpus(wide_headed_model_dir) as made:
        yield made


@pytest.fixture(params=["fake", "fleet", "changes", "adapters", "shared", "copied", *VLLM, *GPU])
def parts(request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path: Path) -> Parts:
    """(channel, engine, policy)."""
    if request.param in ("cuda_ipc", "divided_cuda_ipc", "nccl"):
        return cast(Parts, request.getfixturevalue(request.param))
    return on_a_cpu(request, tiny_model_dir, tmp_path)


def on_a_cpu(request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path: Path) -> Parts:
    if request.param == "fake":
        engine = FakeRolloutEngine()
        return FakeWeightChannel(engine), engine, FakePolicy()
    if request.param in ("fleet", "changes"):
        fleet = EngineFleet([FakeWeightReceiver() for _ in range(3)])
        backend = Changes(shared_memory) if request.param == "changes" else shared_memory
        return FleetWeights(fleet, backend=backend), fleet, FakePolicy()
    if request.param == "adapters":
        fleet = EngineFleet([FakeWeightReceiver() for _ in range(3)])
        return FleetWeights(fleet, backend=shared_memory_adapter), fleet, AdaptedPolicy()
    way, _, of_changes = request.param.partition("_")
    if way in ("vllm", "disk"):
        tiny_model_dir = request.getfixturevalue("wide_headed_model_dir")
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    policy = TorchPolicy(model, load_tokenizer(str(tiny_model_dir), flag=FLAG), OptimizerSettings(lr=0.1))
    if request.param == "copied":
        model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    if way in ("vllm", "disk"):
        vllm = request.getfixturevalue("vllm_engine")
        backend = Disk(tmp_path / "weights") if way == "disk" else shared_memory
        return EngineWeights(vllm, backend=Changes(backend) if of_changes else backend), vllm, policy
    embedded = EmbeddedEngine(model, eos_token_ids=())
    channel = CopiedWeights(embedded) if request.param == "copied" else SharedWeights(embedded)
    return channel, embedded, policy


async def test_tokens_after_a_push_carry_its_version(parts: tuple[WeightChannel, Any, PolicyModel]) -> None:
    channel, engine, policy = parts

    assert isinstance(channel, WeightChannel)
    for version in (1, 2, 5):
        moved = await channel.push(policy, version)
        assert moved.keys() == {"seconds", "bytes"}
        assert all(value >= 0 for value in moved.values())
        assert set((await engine.generate(REQUEST)).versions) == {version}


async def test_an_engine_that_is_sampling_refuses_unless_paused(parts: tuple[WeightChannel, Any, PolicyModel]) -> None:
    channel, engine, policy = parts

    task = asyncio.create_task(engine.generate(REQUEST))
    await asyncio.sleep(0)
    with pytest.raises(EngineError):
        await channel.push(policy, 1)
    await engine.pause(PauseMode.KEEP)
    await channel.push(policy, 1)
    await engine.resume()
    assert set((await task).versions) <= {0, 1}


@pytest.mark.parametrize("own", [False, True], ids=["shared", "copied"])
async def test_the_engine_samples_from_the_updated_weights(tiny_model_dir: Path, own: bool) -> None:
    from rollgrad.domain.batches.packed import pack
    from rollgrad.testing.agent_executor import make_trajectory

    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    policy = TorchPolicy(model, load_tokenizer(str(tiny_model_dir), flag=FLAG), OptimizerSettings(lr=0.05))
    sampled = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    engine = EmbeddedEngine(sampled if own else model, eos_token_ids=())
    channel = CopiedWeights(engine) if own else SharedWeights(engine)
    greedy = GenerationRequest(prompt_token_ids=(65, 66), params=SamplingParams(temperature=0.0, max_new_tokens=1))
    wanted = 123
    batch = pack([make_trajectory([65, 66], [wanted])])

    def likelihood(scores: TokenScores, part: PackedBatch) -> LossOutput:
        return LossOutput(loss=-scores.logprobs_N.sum())

    assert (await engine.generate(greedy)).token_ids != [wanted]
    for _ in range(10):
        policy.update([batch], likelihood)
    moved = await channel.push(policy, 1)
    assert (await engine.generate(greedy)).token_ids == [wanted]
    assert moved["bytes"] == (sum(tensor.nbytes for _, tensor in policy.weights()) if own else 0)


PING = 0.002


class CountedPolicy(FakePolicy):
    """Says what `FleetWeights` asks of a policy that is trained; `during` runs while its weights are read."""

    def __init__(self) -> None:
        super().__init__(torch.randn(320, generator=torch.Generator().manual_seed(0)))
        self.steps = 0
        self.reads = 0
        self.wrong = 0.0
        self.changed = 1.0
        self.during: Callable[[], None] = lambda: None

    def step(self) -> None:
        """Changes all weights, as an update does, or some."""
        self.steps += 1
        chance = torch.Generator().manual_seed(self.steps)
        with torch.no_grad():
            changed = torch.rand(320, generator=chance) < self.changed
            self._table.table_V += changed * torch.randn(320, generator=chance)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.reads += 1
        for index, (name, tensor) in enumerate([*super().weights(), ("rest", torch.ones(5 * 2**20))]):
            if index == 1:
                self.during()
            yield name, tensor + self.wrong


def channel_of(
    size: int, *, max_restarts: int = 20, group: bool = False, backend: Backend = shared_memory
) -> tuple[FleetWeights, EngineFleet, list[FakeWeightReceiver]]:
    members = [FakeWeightReceiver() for _ in range(size)]
    FakeWeightReceiver.transferring = 0
    bounds = FleetBounds(suspect_after=1000.0, dead_after=1000.0, max_restarts=max_restarts)
    fleet = EngineFleet(members, bounds=bounds, ping_seconds=PING)
    backend = FakeGroupBackend(members) if group else backend
    return FleetWeights(fleet, backend=backend), fleet, members


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(PING)


def has_all(member: FakeWeightReceiver, policy: CountedPolicy) -> bool:
    return member.broken is None and all(
        name in member.weights and torch.equal(member.weights[name], tensor) for name, tensor in policy.weights()
    )


async def test_a_fleet_takes_what_was_written_once() -> None:
    channel, fleet, members = channel_of(4)
    policy = CountedPolicy()
    moved = await channel.push(policy, 1)
    assert policy.reads == 1
    assert moved["bytes"] == sum(tensor.nbytes for _, tensor in policy.weights())
    assert all(has_all(member, policy) for member in members)
    assert fleet.health.serving == [0, 1, 2, 3]
    await fleet.aclose()


@pytest.mark.parametrize("step", ["begin", "take", "finish", "prove"])
async def test_an_engine_that_dies_in_a_push_is_replaced_and_the_others_go_on(step: str) -> None:
    channel, fleet, members = channel_of(3)
    policy = CountedPolicy()
    members[1].die_at = step
    await channel.push(policy, 1)
    assert fleet.health.serving == [0, 2]
    await until(lambda: fleet.health.serving == [0, 1, 2])
    assert members[1].restarts == 1
    assert all(has_all(member, policy) for member in members)
    assert {member.version for member in members} == {1}
    await fleet.aclose()


async def test_a_silent_engine_is_waited_for_aloud_and_is_not_asked_for_as_long_again_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(waiting_for.__wrapped__.__kwdefaults__, "after", 0.01)  # type: ignore[attr-defined]
    monkeypatch.setattr(channel_module, "CALL_SECONDS", 0.3)
    monkeypatch.setattr(channel_module, "GRACE_SECONDS", 0.1)
    channel, fleet, members = channel_of(2)
    take = members[1].take_weights

    async def fall_silent(update: Mapping[str, Any]) -> None:
        monkeypatch.setattr(channel_module, "CALL_SECONDS", 600.0)  # from the next call on
        members[1].freeze()
        await take(update)

    members[1].take_weights = fall_silent  # type: ignore[method-assign]
    with capture_logs() as logs:
        async with asyncio.timeout(60):
            await channel.push(CountedPolicy(), 1)
    assert "waiting for 2 engines to take a bucket in a transfer of weights (at most 0.3 s)" in [
        line["event"] for line in logs
    ]
    assert fleet.health.serving == [0]
    await fleet.aclose()


@pytest.mark.parametrize("when", ["before the transfer", "during it"])
async def test_an_engine_that_restarts_after_the_policy_has_changed_waits_for_the_next_push(when: str) -> None:
    channel, fleet, members = channel_of(2)
    policy = CountedPolicy()
    await channel.push(policy, 1)
    if when == "before the transfer":
        policy.step()
    else:
        policy.during = policy.step
    members[0].kill()
    await until(lambda: fleet.health.state(0) is EngineState.STALE)
    await until(lambda: policy.steps == 1 and not channel._lock.locked())
    for seed in range(6):
        await fleet.generate(GenerationRequest(prompt_token_ids=(65,), params=SamplingParams(seed=seed)))
    assert fleet.health.serving == [1]
    assert len(members[0].served) == 0
    assert FakeWeightReceiver.transferring == 0
    policy.during = lambda: None
    await channel.push(policy, 2)
    assert fleet.health.serving == [0, 1]
    assert all(has_all(member, policy) for member in members)
    await fleet.aclose()


async def test_a_group_goes_on_without_an_engine_that_does_not_begin() -> None:
    channel, fleet, members = channel_of(3, group=True)
    policy = CountedPolicy()
    members[1].die_at = "begin"
    await channel.push(policy, 1)
    backend = channel._backend
    assert isinstance(backend, FakeGroupBackend)
    first, second = backend.groups[:2]
    assert first == [(0, 0), (1, 0), (2, 0)]
    assert {(0, 0), (2, 0)} <= set(second) <= {(0, 0), (1, 1), (2, 0)}
    await until(lambda: fleet.health.serving == [0, 1, 2])
    assert [member.restarts for member in members] == [0, 1, 0]
    assert all(has_all(member, policy) for member in members)
    await fleet.aclose()


async def test_a_group_is_lost_with_an_engine_that_dies_on_the_way_and_its_replacements_take_the_weights() -> None:
    channel, fleet, members = channel_of(3, group=True)
    policy = CountedPolicy()
    members[1].die_at = "take"
    await channel.push(policy, 1)
    await until(lambda: fleet.health.serving == [0, 1, 2])
    assert [member.restarts for member in members] == [1, 1, 1]
    assert all(has_all(member, policy) for member in members)
    assert FakeWeightReceiver.transferring == 0
    await fleet.aclose()


async def test_when_all_engines_die_in_a_push_it_begins_again_with_their_replacements() -> None:
    channel, fleet, members = channel_of(2)
    policy = CountedPolicy()
    for member in members:
        member.die_at = "take"
    await channel.push(policy, 1)
    await until(lambda: fleet.health.serving == [0, 1])
    assert all(has_all(member, policy) for member in members)
    await fleet.aclose()


async def test_an_engine_that_took_the_push_that_waited_for_it_is_not_sent_it_again() -> None:
    """It may be sampling by then, and would be given up because it refuses."""

    channel, fleet, (member,) = channel_of(1)
    policy = CountedPolicy()
    member.die_at = "take"
    refreshed: list[Taker] = []

    async def noted(taker: Taker) -> None:
        await channel.refresh(taker)
        refreshed.append(taker)

    fleet.refresh = noted
    await channel.push(policy, 1)
    await until(lambda: refreshed != [])
    assert policy.reads == 2
    assert fleet.health.deaths.total() == 1
    await fleet.aclose()


async def test_a_push_that_no_engine_can_take_is_an_error() -> None:
    channel, fleet, members = channel_of(2, max_restarts=0)
    for member in members:
        member.die_at = "finish"
    with pytest.raises(EngineError, match="All 2 engines are dead"):
        await channel.push(CountedPolicy(), 1)
    await fleet.aclose()


async def test_engines_that_compute_something_else_are_an_error() -> None:
    channel, fleet, _ = channel_of(2)
    policy = CountedPolicy()
    policy.wrong = float("nan")
    with pytest.raises(EngineError, match="differ from the trainer's"):
        await channel.push(policy, 1)
    await fleet.aclose()


async def test_a_transfer_that_the_trainer_breaks_off_leaves_engines_that_the_next_push_heals() -> None:
    channel, fleet, members = channel_of(2)
    policy = CountedPolicy()

    def fail() -> None:
        raise OSError("the trainer lost a rank")

    ends: list[bool] = []

    def noted(*arguments: Any) -> WeightStream:
        stream = shared_memory(*arguments)
        return evolve(stream, close=lambda well: (ends.append(well), stream.close(well)))

    channel._backend = noted
    policy.during = fail
    with pytest.raises(OSError, match="lost a rank"):
        await channel.push(policy, 1)
    assert fleet.health.serving == []
    assert FakeWeightReceiver.transferring == 0
    policy.during = lambda: None
    await channel.push(policy, 1)
    assert fleet.health.serving == [0, 1]
    assert ends == [False, True]
    assert all(has_all(member, policy) for member in members)
    assert not fleet.health.deaths
    await fleet.aclose()


class ShardedPolicy(CountedPolicy):
    """Sends its weights itself, as one whose weights lie in other processes."""

    def sent(
        self, send: Send, *arguments: Any, ranks: Sequence[int] = (0,), adapter: bool = False
    ) -> Iterator[list[Any]]:
        assert ranks == (0,)
        assert not adapter
        for message in send(super().weights(), *arguments):
            yield [message]

    def parts(self) -> int:
        return 0

    def sent_parts(self, send: Send, *arguments: Any) -> Iterator[list[Any]]:
        raise AssertionError("it has no parts")

    def address(self) -> tuple[str, int]:
        raise AssertionError("nobody has to find it")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("the whole model is in no process")


async def test_a_policy_that_sends_its_weights_itself_is_let_to() -> None:
    channel, fleet, members = channel_of(2)
    policy = ShardedPolicy()
    moved = await channel.push(policy, 1)
    whole = CountedPolicy()
    assert moved["bytes"] == sum(tensor.nbytes for _, tensor in whole.weights())
    assert all(has_all(member, whole) for member in members)
    await fleet.aclose()


class PartedPolicy(ShardedPolicy):
    """Three processes have a part each; those of the last are smaller, so that it has sent all of its own earlier."""

    def parts(self) -> int:
        return 3

    def sent_parts(self, send: Send, *arguments: Any) -> Iterator[list[Any]]:
        ways = [send(self.runs(rank), rank, 3, *arguments) for rank in range(3)]
        yield from map(list, zip_longest(*ways))

    def runs(self, rank: int) -> Iterator[Run]:
        for name, tensor in CountedPolicy.weights(self):
            begin, end = (int(len(tensor) * share) for share in ((0, 0.45, 0.9, 1)[rank], (0, 0.45, 0.9, 1)[rank + 1]))
            yield Run(name, tuple(tensor.shape), begin, tensor[begin:end])


async def test_processes_that_have_parts_of_the_weights_each_write_their_own() -> None:
    channel, fleet, members = channel_of(2)
    policy = PartedPolicy()
    whole = CountedPolicy()
    for version in (1, 2):
        moved = await channel.push(policy, version)
        assert moved["bytes"] == sum(tensor.nbytes for _, tensor in whole.weights())
        assert all(has_all(member, whole) for member in members)
    members[1].die_at = "take"
    await channel.push(policy, 3)
    await until(lambda: fleet.health.serving == [0, 1])
    assert all(has_all(member, whole) for member in members)
    await fleet.aclose()


@pytest.mark.parametrize("way", ["memory", "group", "changes"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.wide) for seed in (2, 3, 4))])
async def test_pushes_and_refreshes_never_overlap_and_who_serves_has_the_weights(seed: int, way: str) -> None:
    chance = random.Random(seed)

    backend = Changes(shared_memory) if way == "changes" else shared_memory
    channel, fleet, members = channel_of(3, max_restarts=1000, group=way == "group", backend=backend)
    policy = CountedPolicy()
    policy.changed = 0.1
    for version in range(1, 8):
        for member in members:
            if chance.random() < 0.4:
                member.die_at = chance.choice(["begin", "take", "finish", "prove"])
            elif chance.random() < 0.3:
                member.kill()
        await channel.push(policy, version)
        for number in fleet.health.serving:
            assert has_all(members[number], policy)
            assert members[number].version == version
        for _ in range(chance.randint(0, 5)):
            await asyncio.sleep(PING)
        policy.step()
    for member in members:
        member.die_at = None
    await channel.push(policy, 8)
    await until(lambda: fleet.health.serving == [0, 1, 2])
    assert all(has_all(member, policy) for member in members)
    assert FakeWeightReceiver.transferring == 0
    await fleet.aclose()


async def test_after_a_whole_transfer_changes_alone_go_to_engines_that_took_it() -> None:
    channel, fleet, members = channel_of(2, backend=Changes(shared_memory))
    policy = CountedPolicy()
    policy.changed = 0.1
    whole = sum(tensor.nbytes for _, tensor in policy.weights())
    moved = [(await channel.push(policy, 1))["bytes"]]
    for version in (2, 3, 4):
        policy.step()
        moved.append((await channel.push(policy, version))["bytes"])
        assert all(has_all(member, policy) for member in members)
    moved.append((await channel.push(policy, 5))["bytes"])
    assert moved[0] == whole
    assert all(0 < size < 0.2 * 320 * 6 for size in moved[1:4])
    assert moved[4] == 0
    await fleet.aclose()


async def test_an_engine_that_was_restarted_makes_the_next_transfers_whole() -> None:
    """Transfers to it alone and then to all, because it took another one last than the others."""
    channel, fleet, members = channel_of(2, backend=Changes(shared_memory))
    policy = CountedPolicy()
    policy.changed = 0.1
    await channel.push(policy, 1)
    members[0].kill()
    await until(lambda: members[0].restarts == 1 and fleet.health.serving == [0, 1])
    for version in (2, 3):
        policy.step()
        await channel.push(policy, version)
        assert all(has_all(member, policy) for member in members)
    whole = [[base is None for base in member.bases] for member in members]
    assert whole == [[True, True, True, False], [True, True, False]]
    await fleet.aclose()


async def test_an_engine_that_lost_its_weights_unnoticed_refuses_changes_and_gets_all_weights() -> None:
    channel, fleet, (member,) = channel_of(1, backend=Changes(shared_memory))
    policy = CountedPolicy()
    policy.changed = 0.1
    await channel.push(policy, 1)
    member.weights, member._has = {}, None
    policy.step()
    await channel.push(policy, 2)
    assert has_all(member, policy)
    assert member.restarts == 1
    await fleet.aclose()


async def test_the_trainer_computes_before_engines_take_the_rest_of_their_memory() -> None:
    """On GPUs that they share its pass needs some that the engines' keys and values will have."""
    told: list[str] = []

    class Engine(FakeWeightReceiver):
        async def finish_weights(self, version: int) -> None:
            told.append("finish")
            await super().finish_weights(version)

    class Policy(FakePolicy):
        def score(self, batch: PackedBatch) -> TokenScores:
            told.append("score")
            return super().score(batch)

    fleet = EngineFleet([Engine(), Engine()])
    try:
        await FleetWeights(fleet).push(Policy(), 1)
        assert told == ["score", "finish", "finish"]
        told.clear()
        await EngineWeights(Engine()).push(Policy(), 1)
        assert told == ["score", "finish"]
    finally:
        await fleet.aclose()
