"""Sections of first light about several GPUs: models that processes of Ray divide, and engines on GPUs of their own."""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dependency_injector import providers

from benchmarks.first_light_common import GPU, RUN, batch, config, free_all, model, ms, step
from benchmarks.first_light_engines import SOON, lacking, runs_of, saved
from rollgrad.domain.ports.checkpoint_store import STORED_IN

STEPS = 5
"""Steps after which log-probs are compared again."""

FEW = 100
"""Steps of the run that settings are for."""

WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "": {
        "zero 2": {"ds.zero_stage": 2},
        "zero 3": {"ds.zero_stage": 3},
        "fsdp2": {"cluster.strategy": "fsdp2"},
        "fsdp2, offloaded": {"cluster.strategy": "fsdp2", "cluster.offload": True},
        "zero 3, sequences": {"ds.zero_stage": 3, "ds.sequence_parallel_size": 2},
        "fsdp2, sequences": {"cluster.strategy": "fsdp2", "ds.sequence_parallel_size": 2},
        "zero 2, layers": {"ds.zero_stage": 2, "ds.tensor_parallel_size": 2},
    },
    "one key head": {
        "fsdp2, queries": {"cluster.strategy": "fsdp2", "ds.sequence_parallel_size": 2},
    },
    "experts": {
        "zero 3, experts": {"ds.zero_stage": 3},
        "fsdp2, experts": {"cluster.strategy": "fsdp2", "cluster.expert_parallel_size": 2},
    },
}
"""Settings of each way to divide a model, by models."""

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("Qwen3Config", {}),
    "one key head": ("Qwen3Config", {"num_hidden_layers": 2, "num_key_value_heads": 1}),
    "experts": (
        "Qwen3MoeConfig",
        {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    ),
}
"""Kind of each model and what is not as in Qwen3-0.6B: processes divide the queries of one that has fewer heads of keys
than they are, and experts where there are any."""

SECONDS = 220.0
"""Seconds of a run at most, in which several engines start, and compile."""

HANGING = 150.0
"""Seconds after which processes that do not answer are given up, so that the other ways are tried."""

NEAR = 0.25
"""Largest mean difference of log-probs from those of one process, as a share of how far the steps have moved them: sums
of 16 bits are taken in another order."""


def pairs() -> int:
    """Number of processes: as many pairs as there are GPUs for, or one without GPUs."""
    return torch.cuda.device_count() // 2 * 2 if GPU else 2


def divisions(out: Any) -> None:
    """Models that processes divide, each on a GPU of its own, in each way. Checks whether log-probs are those of one
    process: before and after steps, and after a training state was loaded from files. Measures the times of a step, of
    gathering the weights, and of the state."""
    if not GPU or pairs() < 2 or (missing := lacking("ray", "deepspeed")):
        out["left out"] = "needs two GPUs" if pairs() < 2 or not GPU else f"needs {missing}"
        return
    divided(out)


def divided(out: Any) -> None:
    """Compares all ways with one process."""
    from rollgrad.adapters.ray.session import RaySession

    session = RaySession(None, cpus=pairs())  # one for all of them: it takes ten seconds to start
    try:
        for name, ways in WAYS.items():
            kind, others = SHAPES[name]
            with saved(model(shape=config(kind, **others))) as folder:
                compared(folder, ways, out, f"one process, {name}" if name else "one process")
    finally:
        session.close()
    wrong = [name for ways in WAYS.values() for name in ways if not out[f"{name} is right"]]
    assert not wrong, f"these do not compute what one process computes: {wrong}"


def compared(folder: str, ways: dict[str, dict[str, Any]], out: Any, lonely: str) -> None:
    """Compares ways to divide the model in a folder with one process, which is called `lonely`."""
    count = pairs()
    batches = batch(2 * count, 4, *((8, 16) if RUN.tiny else (512, 512)))
    alone = found(partial(lone, folder), batches, out, lonely)
    out[f"{lonely}: steps moved log-probs by"] = moved = round((alone[0] - alone[1]).abs().mean().item(), 5)
    for name, settings in ways.items():
        try:
            scores = found(partial(several, folder, count, settings), batches, out, name)
            out[f"{name} differs"] = gaps = [
                round((one - other).abs().mean().item(), 5) for one, other in zip(scores, alone, strict=True)
            ]
            out[f"{name} is right"] = max(gaps) < NEAR * moved
        except Exception as error:
            out[f"{name} is right"] = False
            out[f"{name} failed"] = f"{type(error).__name__}: {error}"[:2000]


def found(make: Any, batches: Any, out: Any, name: str) -> list[Any]:
    """Log-probs before and after steps of a policy, and with the state of then after a further step, with the function
    that closes it, which `make` returns."""
    t = time.perf_counter()
    policy, close = make()
    try:
        begun, before = time.perf_counter() - t, policy.score(batches).logprobs_N
        for _ in range(STEPS):
            step(policy, batches)
        after = policy.score(batches).logprobs_N
        t = time.perf_counter()
        size = sum(tensor.nbytes for _, tensor in policy.weights())
        gathered = time.perf_counter() - t
        with tempfile.TemporaryDirectory() as folder:
            t = time.perf_counter()
            write_state = getattr(policy, "write_state", None) or policy.state_dict().write_files
            write_state(Path(folder))
            written = time.perf_counter() - t
            milliseconds = ms(partial(step, policy, batches), repeats=3, warm=1)
            t = time.perf_counter()
            policy.load_state_dict({STORED_IN: folder})
            loaded = time.perf_counter() - t
        out[name] = {
            "start_s": round(begun, 1),
            "step_ms": round(milliseconds, 1),
            "weights_s": round(gathered, 2),
            "gib": round(size / 2**30, 2),
            "state_written_s": round(written, 2),
            "state_loaded_s": round(loaded, 2),
        }
        return [before, after, policy.score(batches).logprobs_N]
    finally:
        del policy
        close()
        free_all()


def configured(folder: str, settings: dict[str, Any]) -> Any:
    """Settings of a run on the model in a folder."""
    from rollgrad.application.settings.run import RLConfig
    from rollgrad.entrypoints.kinds import settle

    run = RLConfig()
    run.actor.model_name_or_path, run.actor.dtype = folder, "bfloat16"
    run.actor.adam.lr, run.algo.advantage.estimator, run.algo.kl.init_coef = SOON, "group_norm", 0.0
    run.cluster.timeout = HANGING
    for name, value in settings.items():
        section, _, key = name.partition(".")
        setattr(getattr(run, section), key, value)
    settle(run)
    return run


def lone(folder: str) -> tuple[Any, Any]:
    """The actor of a run of one process."""
    from rollgrad.entrypoints.composition.rl.container import rl_container

    made = rl_container(configured(folder, {}))
    made.total_steps.override(providers.Object(FEW))
    return made.local_policy(), made.reset_singletons


def several(folder: str, count: int, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The actor of a run in processes of Ray."""
    from rollgrad.entrypoints.composition.cluster import Cluster, Role
    from rollgrad.entrypoints.composition.rl.container import rl_container

    run = configured(folder, {**settings, "cluster.enable": True, "actor.num_gpus_per_node": count})
    made = Cluster(run, {"actor": Role(count, count)}, [])
    try:
        return made.policy(rl_container, FEW), made.close
    except BaseException:
        made.close()
        raise


def fleets(out: Any) -> None:
    """Runs of the command line on several GPUs: engines on GPUs of their own, which get weights by NCCL, over two of
    them each where there are four and more, and engines over two GPUs each that models train on."""
    if not GPU or pairs() < 2 or (missing := lacking("ray", "vllm", "deepspeed")):
        out["left out"] = "needs two GPUs" if pairs() < 2 or not GPU else f"needs {missing}"
        return
    runs_of(out, runs_on(pairs()), longest=SECONDS)


def runs_on(gpus: int) -> dict[str, list[str]]:
    """Flags of each run on so many GPUs."""
    half = gpus // 2
    group = ["--algo.advantage.estimator", "group_norm"]
    apart = [*group, "--train.colocate_actor_ref", "--actor.num_gpus_per_node", str(half)]
    shared = [*group, "--train.colocate_all", "--vllm.gpu_memory_utilization", "0.3"]
    return {
        "engines apart, zero 3": [*apart, *engines(half), "--ds.zero_stage", "3"],
        "engines apart, fsdp2, asynchronous": [
            *(*apart, *engines(half, over=min(2, half))),
            *("--cluster.strategy", "fsdp2", "--train.async_enable"),
        ],
        "wide engines on the same GPUs": [
            *(*shared, *engines(gpus, over=2)),
            *("--actor.num_gpus_per_node", str(gpus), "--ds.zero_stage", "2"),
        ],
    }


def engines(gpus: int, *, over: int = 1) -> list[str]:
    """Flags of as many engines as so many GPUs are enough for, each over some of them."""
    return ["--vllm.tensor_parallel_size", str(over), "--vllm.num_engines", str(gpus // over)]
