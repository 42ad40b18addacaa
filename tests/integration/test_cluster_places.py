"""The places of models and engines on two machines of two GPUs; here the GPUs are pretended, and the machines share
one."""

import asyncio
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rollgrad
from rollgrad.adapters.engines import ray_vllm
from rollgrad.adapters.ray.placement import MACHINE, Placement
from rollgrad.adapters.ray.session import RaySession
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.domain.errors import ConfigurationError
from rollgrad.testing.reward_source import FakeRewardSource
from tests.example_runs import logged
from tests.fakes.cluster import wait_for
from tests.fakes.controller import letters
from tests.fakes.seen_gpus import SeeingHost, SeeingWorker, Seen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

GPUS = 2
"""GPUs of each machine."""
Spread = Callable[[Sequence[str]], None]


@pytest.fixture(scope="module")
def machines(kept_groups: Any) -> Iterator[list[str]]:
    """Two machines, this process's first, where Ray shows no process its GPUs, as other trainers ask of it."""
    import ray
    from ray.cluster_utils import Cluster

    kept_groups.close()
    ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        size = {"num_cpus": GPUS, "num_gpus": GPUS}
        nodes = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
        nodes.add_node(**size)
    session = RaySession(nodes.address, cpus=0)
    here = ray.get_runtime_context().get_node_id()
    yield [here, *(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)]
    session.close()
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> Spread:
    """Makes Ray place the next bundles on these machines."""
    module = importlib.import_module("ray.util.placement_group")  # `ray.util` has its function by that name
    reserve = module.placement_group

    def on(places: Sequence[str]) -> None:
        def reserved(bundles: Any, **settings: Any) -> Any:
            return reserve(bundles, **settings | {"bundle_label_selector": [{MACHINE: place} for place in places]})

        monkeypatch.setattr(module, "placement_group", reserved)

    return on


@pytest.fixture
def placed() -> Iterator[Callable[..., Placement]]:
    """Makes placements that end with the test."""
    made: list[Placement] = []

    def place(bundles: int, **settings: Any) -> Placement:
        made.append(Placement("actor and engines", bundles, **{"gpus": 1, "shared": True, "timeout": 60} | settings))
        return made[-1]

    yield place
    for placement in made:
        placement.remove()


def seen_by_workers(placement: Placement, size: int) -> list[Seen]:
    import ray

    remote = ray.remote(SeeingWorker)
    workers = [
        remote.options(**placement.slot(rank).options()).remote(rank, size, 1, own_gpu=False) for rank in range(size)
    ]
    return ray.get([worker.seen.remote() for worker in workers], timeout=300)


def test_neighbours_are_on_one_machine_and_an_engine_has_the_gpus_of_some(
    machines: list[str],
    spread: Spread,
    placed: Callable[..., Placement],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However Ray has spread them: here one on the other machine, one on this, and so on."""
    monkeypatch.setattr(ray_vllm, "EngineHost", SeeingHost)
    here, other = machines
    spread([other, here] * GPUS)
    placement = placed(2 * GPUS, here=2)
    workers = seen_by_workers(placement, 2 * GPUS)
    assert [machine for machine, _ in workers] == [here] * GPUS + [other] * GPUS
    for machine in machines:
        assert {gpu for at, gpu in workers if at == machine} == {"0", "1"}

    slots = [placement.joint_slot(2 * number, 2) for number in range(GPUS)]

    async def scenario() -> list[Seen]:
        engines = await ray_vllm.start_engines(
            GPUS,
            {},
            options=[slot.options() for slot in slots],
            devices=[slot.devices for slot in slots],
            seconds=300,
        )
        await engines[1].restart()
        try:
            return [await engine._call("telling what it sees", "seen") for engine in engines]
        finally:
            for engine in engines:
                await engine.close()

    engines = asyncio.run(scenario())
    for number, engine in enumerate(engines):
        (machine, first), (_, second) = workers[2 * number : 2 * number + 2]
        assert engine == (machine, f"{first},{second}")


def test_an_engine_alone_has_the_gpus_that_ray_gives_it(machines: list[str], placed: Callable[..., Placement]) -> None:
    placement = placed(2, gpus=GPUS, shared=False)
    assert seen_by_workers(placement, 2) == [(machine, "0,1") for machine in machines]


def test_an_engine_is_on_one_machine(machines: list[str], spread: Spread, placed: Callable[..., Placement]) -> None:
    here, other = machines
    spread([here, other, here, other])
    placement = placed(4)
    assert [placement.spread(first, 2) for first in (0, 2)] == [1, 1]
    assert placement.joint_slot(0, 2).devices == tuple(gpu for _, gpu in seen_by_workers(placement, 2))
    with pytest.raises(ConfigurationError, match="2 neighbours, whose GPUs one engine shares, are on 2 machines"):
        placement.joint_slot(1, 2)


def test_room_on_this_machine_is_waited_for(machines: list[str], placed: Callable[..., Placement]) -> None:
    from ray.util import placement_group_table

    first = placed(2 * GPUS)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(placed, 2, here=2)
        wait_for(lambda: "PENDING" in {group["state"] for group in placement_group_table().values()}, "the second")
        assert not second.done()
        first.remove()
        assert {seen[0] for seen in seen_by_workers(second.result(60), 2)} == {machines[0]}


@pytest.mark.parametrize(
    "divided", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.wide)]
)
def test_a_run_trains_on_the_gpus_of_an_engine(
    machines: list[str], divided: str, wide_headed_model_dir: Path, tmp_path: Path
) -> None:
    """The engine's two processes, real ones on a CPU, share the places of the model's two."""
    rows = [{"input": f"Say {number}"} for number in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = RLConfig()
    config.actor.model_name_or_path, config.actor.dtype = str(wide_headed_model_dir), DType.FLOAT32
    config.actor.num_gpus_per_node = 2
    setattr(config.vllm, divided, 2)
    config.algo.advantage.estimator = "group_norm"
    config.data.prompt_dataset = str(tmp_path / "prompts.jsonl")
    config.rollout.engine, config.vllm.sync_backend = Engine.VLLM, SyncBackend.SHARED_MEMORY
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens = 2, 2, 8
    config.train.max_steps, config.train.colocate_all = 2, True
    config.cluster.enable, config.cluster.timeout, config.ds.zero_stage = True, 600, 3
    config.ckpt.output_dir, config.logger.console = str(tmp_path / "run"), False
    before = {*Path("/dev/shm").glob("vllm_dist_*")}
    rollgrad.train(config, reward=FakeRewardSource(letters))
    assert {*Path("/dev/shm").glob("vllm_dist_*")} <= before, "no name is left of what its processes shared"
    lines = logged(tmp_path / "run")
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == 2
    assert all(line["policy/mismatch_kl"] < 1e-5 for line in steps), "engine and trainer agree on what they sample"
