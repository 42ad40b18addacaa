"""Sections of first light about several GPUs: models that processes of Ray divide, and engines on GPUs of their own."""

import time
from functools import partial
from typing import Any

import torch
from dependency_injector import providers

from benchmarks.first_light_common import GPU, RUN, batch, free_all, model, ms, step
from benchmarks.first_light_engines import SOON, lacking, runs_of, saved

STEPS = 5
"""Steps after which log-probs are compared again."""

FEW = 100
"""Steps of the run that settings are for."""

WAYS: dict[str, dict[str, Any]] = {
    "zero 2": {"ds.zero_stage": 2},
    "zero 3": {"ds.zero_stage": 3},
    "fsdp2": {"cluster.strategy": "fsdp2"},
    "fsdp2, offloaded": {"cluster.strategy": "fsdp2", "cluster.offload": True},
    "zero 3, sequences": {"ds.zero_stage": 3, "ds.sequence_parallel_size": 2},
    "fsdp2, sequences": {"cluster.strategy": "fsdp2", "ds.sequence_parallel_size": 2},
    "zero 2, layers": {"ds.zero_stage": 2, "ds.tensor_parallel_size": 2},
}
"""Settings of each way to divide a model."""

SECONDS = 240.0
"""Seconds of a run at most, in which several engines start, and compile."""

NEAR = 0.25
"""Largest mean difference of log-probs from those of one process, as a share of how far the steps have moved them: sums
of 16 bits are taken in another order."""


def pairs() -> int:
    """Number of processes: as many pairs as there are GPUs for, or one without GPUs."""
    return torch.cuda.device_count() // 2 * 2 if GPU else 2


def divisions(out: Any) -> None:
    """Models that processes divide, each on a GPU of its own, by each way: whether log-probs before and after steps are
    those of one process, and the times of a step and of gathering the weights."""
    if not GPU or pairs() < 2 or (missing := lacking("ray", "deepspeed")):
        out["left out"] = "needs two GPUs" if pairs() < 2 or not GPU else f"needs {missing}"
        return
    divided(out)


def divided(out: Any) -> None:
    """Compares all ways with one process."""
    tiny, count = RUN.tiny, pairs()
    batches = batch(2 * count, 4, *((8, 16) if tiny else (512, 512)))
    with saved(model()) as folder:
        alone = found(partial(lone, folder), batches, out, "one process")
        out["steps moved log-probs by"] = moved = round((alone[0] - alone[1]).abs().mean().item(), 5)
        for name, settings in WAYS.items():
            try:
                scores = found(partial(several, folder, count, settings), batches, out, name)
                out[f"{name} differs"] = gaps = [
                    round((one - other).abs().mean().item(), 5) for one, other in zip(scores, alone, strict=True)
                ]
                out[f"{name} is right"] = max(gaps) < NEAR * moved
            except Exception as error:
                out[f"{name} is right"] = False
                out[f"{name} failed"] = f"{type(error).__name__}: {error}"[:2000]
    wrong = [name for name in WAYS if not out[f"{name} is right"]]
    assert not wrong, f"these do not compute what one process computes: {wrong}"


def found(make: Any, batches: Any, out: Any, name: str) -> list[Any]:
    """Log-probs before and after steps of a policy, with the function that closes it, which `make` returns."""
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
        out[name] = {
            "start_s": round(begun, 1),
            "step_ms": round(ms(partial(step, policy, batches), repeats=3, warm=1), 1),
            "weights_s": round(gathered, 2),
            "gib": round(size / 2**30, 2),
        }
        return [before, after]
    finally:
        del policy
        close()
        free_all()


def configured(folder: str, settings: dict[str, Any]) -> Any:
    """Settings of a run on the model in a folder."""
    from rollgrad.application.settings.run import RLConfig
    from rollgrad.application.settings.spelling import canonical_choices

    run = RLConfig()
    run.actor.model_name_or_path, run.actor.dtype = folder, "bfloat16"
    run.actor.adam.lr, run.algo.advantage.estimator, run.algo.kl.init_coef = SOON, "group_norm", 0.0
    run.cluster.timeout = 300.0
    for name, value in settings.items():
        section, _, key = name.partition(".")
        setattr(getattr(run, section), key, value)
    canonical_choices(run)
    return run


def lone(folder: str) -> tuple[Any, Any]:
    """The actor of a run of one process."""
    from rollgrad.entrypoints.composition.rl import rl_container

    made = rl_container(configured(folder, {}))
    made.total_steps.override(providers.Object(FEW))
    return made.local_policy(), made.reset_singletons


def several(folder: str, count: int, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The actor of a run in processes of Ray."""
    from rollgrad.entrypoints.composition.cluster import Cluster, Role
    from rollgrad.entrypoints.composition.rl import rl_container

    run = configured(folder, {**settings, "cluster.enable": True, "actor.num_gpus_per_node": count})
    made = Cluster(run, {"actor": Role(count, count)}, [])
    try:
        return made.policy(rl_container, FEW), made.close
    except BaseException:
        made.close()
        raise


def fleets(out: Any) -> None:
    """Runs of the command line on several GPUs: engines on GPUs of their own, which get weights by NCCL, and engines
    over two GPUs each that models train on."""
    if not GPU or pairs() < 2 or (missing := lacking("ray", "vllm", "deepspeed")):
        out["left out"] = "needs two GPUs" if pairs() < 2 or not GPU else f"needs {missing}"
        return
    half, whole = str(pairs() // 2), str(pairs())
    group = ["--algo.advantage.estimator", "group_norm"]
    wide = ["--vllm.tensor_parallel_size", "2", "--vllm.num_engines", half, "--actor.num_gpus_per_node", whole]
    shared = [*group, "--train.colocate_all", "--vllm.gpu_memory_utilization", "0.3"]
    apart = [*group, "--train.colocate_actor_ref", "--actor.num_gpus_per_node", half, "--vllm.num_engines", half]
    runs_of(
        out,
        {
            "engines apart, zero 3": [*apart, "--ds.zero_stage", "3"],
            "engines apart, fsdp2, asynchronous": [*apart, "--cluster.strategy", "fsdp2", "--train.async_enable"],
            "wide engines on the same GPUs": [*shared, *wide, "--ds.zero_stage", "2"],
        },
        longest=SECONDS,
    )
