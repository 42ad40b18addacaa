"""Small runs, and their memory plans by role."""

from rollgrad.application.settings.memory_places import CONTEXT_BYTES, GROUP_BYTES, Machine, RoleMemory, places
from rollgrad.application.settings.memory_plan import memory_plan
from rollgrad.application.settings.memory_plan_passes import ACTIVATIONS_PER_HIDDEN
from rollgrad.application.settings.model_shape import ModelShape
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine

SHAPE = ModelShape(parameters=1000, layers=3, hidden=8, kv_heads=2, head_dim=4, stored=2)
CPU = Machine(gpu=0, memory=2**40)
GPU = Machine(gpu=1_000_000, memory=2**40)
H100 = Machine(gpu=80 * 10**9, memory=2 * 10**12)
LAYER = 8 * ACTIVATIONS_PER_HIDDEN
"""Numbers that a layer keeps of a token."""
CACHE = 8 * 128 * (2 * 3 * 2 * 4) + 8 * 10 * LAYER
"""Numbers in keys and values of all samples, in blocks of 128 tokens, and in a pass over their prompts."""


def small_config() -> RLConfig:
    config = RLConfig()
    config.algo.advantage.estimator = "reinforce"
    config.rollout.batch_size = 4
    config.rollout.n_samples_per_prompt = 2
    config.rollout.max_new_tokens = 6
    config.data.max_prompt_tokens = 10
    config.train.max_tokens_per_micro_batch = 32
    return config


def cluster_config(stage: int = 2, processes: int = 4) -> RLConfig:
    """Nothing shares a GPU."""
    config = small_config()
    config.cluster.enable = True
    config.actor.num_gpus_per_node, config.ds.zero_stage = processes, stage
    config.rollout.engine, config.vllm.num_engines = Engine.VLLM, 2
    return config


def plan(
    config: RLConfig,
    machine: Machine = CPU,
    *,
    compute_bytes: int = 2,
    shape: ModelShape = SHAPE,
    told: int = 0,
    **models: ModelShape,
) -> dict[str, RoleMemory]:
    rows = memory_plan(config, shape, compute_bytes=compute_bytes, machine=machine, told=told, **models)
    return {row.role: row for row in rows}


def at_once(rows: dict[str, RoleMemory], machine: Machine = CPU) -> dict[str, int]:
    """Without what each process takes of a GPU for CUDA and NCCL."""
    found = {}
    for place in places(list(rows.values()), machine):
        roles = place.name.removeprefix("a GPU of ").split(", ") if place.name.startswith("a GPU") else []
        groups = sum(rows[role].groups for role in roles)
        found[place.name] = place.held - len(roles) * CONTEXT_BYTES - groups * GROUP_BYTES
    return found


def parts(row: RoleMemory) -> tuple[int, int, int, int]:
    return row.weights, row.gradients, row.optimizer, row.passes
