"""Translates the cluster of an OpenRLHF command: processes, ZeRO, vLLM and adapters.

OpenRLHF always has a cluster. Here a run has one if the command names a setting of it (`CLUSTER_FLAGS`).
"""

from collections.abc import Sequence

from rollgrad.entrypoints.names.names_of_openrlhf import OFFLOAD
from rollgrad.entrypoints.openrlhf.draft import RLDraft
from rollgrad.entrypoints.openrlhf.shared import lose_zero, translate_adapters, translate_zero

NODE = {"num_nodes": 1, "num_gpus_per_node": 8}
"""OpenRLHF's default processes of a model."""

CLUSTER_FLAGS = (
    *(f"{model}.{key}" for model in ("actor", "critic", "ref") for key in NODE),
    *("train.colocate_all", "train.colocate_actor_ref"),
    *("vllm.num_engines", "vllm.tensor_parallel_size", "vllm.gpu_memory_utilization"),
    *("ds.zero_stage", "ds.adam_offload", "ds.ring_attn_size", "ds.tensor_parallel_size", "ds.lora.rank"),
)
"""Flags that turn on `cluster.enable` and `rollout.engine` vllm."""

REWARD_FLAGS = (*(f"reward.{key}" for key in NODE), "train.colocate_critic_reward")
"""Flags that do so if a reward model is loaded."""

GPU_MEMORY = 0.95
"""OpenRLHF's share of a GPU for an engine."""


def translate_cluster(draft: RLDraft) -> None:
    """Sets `cluster`, `vllm`, `train.colocate_*`, the processes of each model, and the actor's adapters.

    Raises:
        ConfigurationError: a value is not of its flag's kind.
    """
    together = False
    flags = CLUSTER_FLAGS
    if draft.reward_model is not None:
        flags += REWARD_FLAGS
    else:
        for name in REWARD_FLAGS:
            draft.lose(name, "no reward model is loaded, in OpenRLHF neither")
    if any(draft.asks(name) for name in flags):
        draft.set("cluster.enable", True)
        draft.set("rollout.engine", "vllm")
        if draft.submitted:
            draft.set("cluster.address", "auto")
        _processes(draft)
        together = _sharing(draft)
        _engines(draft)
        _transfer(draft)
        translate_zero(draft)
    else:
        lose_zero(draft)
        draft.lose("vllm.enforce_eager", "without a cluster the engine is not vLLM, and has no graphs to replay")
        draft.lose("vllm.sync_backend", "without a cluster the engine reads the trained model itself")
        for model in ("ref", "reward"):
            if draft.asks(f"{model}.offload"):
                draft.lose(f"{model}.offload", OFFLOAD)
    _adapters(draft)
    _sleep(draft, together=together)
    if draft.asks("vllm.enable_sleep") and not together:
        draft.lose("vllm.enable_sleep", "engines sleep where they share GPUs with models, in OpenRLHF too")


def _processes(draft: RLDraft) -> None:
    """Translates the number of processes of each model."""
    actor = {key: draft.value(f"actor.{key}", default) for key, default in NODE.items()}
    for key, value in actor.items():
        draft.set(f"actor.{key}", value)
    others = {"critic": draft.has_critic, "ref": draft.kl_coef != 0, "reward": draft.reward_model is not None}
    for model in (model for model, loaded in others.items() if loaded):
        own = {key: draft.value(f"{model}.{key}", default) for key, default in NODE.items()}
        for key, value in own.items() if own != actor else ():
            draft.set(f"{model}.{key}", value)
    _offload(draft, [model for model in ("ref", "reward") if others[model]])
    if not others["ref"]:
        for key in NODE:
            draft.lose(f"ref.{key}", "a KL weight of 0 loads no reference, in OpenRLHF neither")


def _offload(draft: RLDraft, loaded: Sequence[str]) -> None:
    """Translates which of the frozen models rest in the CPU's memory."""
    asked = [model for model in ("ref", "reward") if draft.asks(f"{model}.offload")]
    resting = [model for model in asked if model in loaded and draft.value("ds.tensor_parallel_size", 1) == 1]
    for model in asked:
        if model in resting:
            draft.set(f"{model}.offload", True)
        elif not resting:  # one flag asks for two models, and the run may have only one of them
            draft.lose(
                f"{model}.offload", "it is the parameters of frozen models that rest, where no layers are shared"
            )


def _sharing(draft: RLDraft) -> bool:
    """Returns whether models and engines share GPUs."""
    together = bool(draft.value("train.colocate_all", False))
    if together and draft.value("train.async_enable", False):
        draft.set("train.colocate_actor_ref", True)
        draft.change(
            "train.colocate_all", "with --async_train actor and reference share GPUs, other models have their own"
        )
        together = False
    elif together:
        draft.set("train.colocate_all", True)
        if not draft.asks("vllm.enable_sleep"):
            draft.change("train.colocate_all", "engines sleep while models train, as with --vllm_enable_sleep")
    if draft.value("train.colocate_actor_ref", False) and not together:
        draft.set("train.colocate_actor_ref", True)
    if draft.value("train.colocate_critic_reward", False) and draft.reward_model is not None and not together:
        if draft.has_critic:
            draft.set("train.colocate_critic_reward", True)
        else:
            draft.lose("train.colocate_critic_reward", f"{draft.estimator} has no critic, in OpenRLHF neither")
    return together


def _engines(draft: RLDraft) -> None:
    """Translates the settings of vLLM's engines."""
    draft.set("vllm.num_engines", draft.value("vllm.num_engines", 1))
    draft.set("vllm.tensor_parallel_size", draft.value("vllm.tensor_parallel_size", 1))
    draft.set("vllm.gpu_memory_utilization", draft.value("vllm.gpu_memory_utilization", GPU_MEMORY))
    if draft.asks("vllm.enforce_eager"):
        draft.set("vllm.extra.enforce_eager", True)


def _transfer(draft: RLDraft) -> None:
    """Translates the way of weights. `auto` is NCCL, and CUDA IPC if GPUs are shared, like OpenRLHF's nccl."""
    backend = draft.value("vllm.sync_backend", "nccl")
    if backend == "gloo":
        draft.set("vllm.sync_backend", "shared_memory")
        draft.change("vllm.sync_backend", "through shared memory, and Ray's object store between machines")
    elif backend != "nccl":
        draft.lose("vllm.sync_backend", "weights go by NCCL, or by CUDA IPC where models and engines share GPUs")


def _sleep(draft: RLDraft, *, together: bool) -> None:
    """Translates the memory that optimizers leave to engines."""
    if not draft.asks("ds.enable_sleep"):
        return
    if not together:
        draft.lose("ds.enable_sleep", "optimizers sleep where models share GPUs with engines: --colocate_all_models")
    elif draft.asks("ds.adam_offload"):
        draft.lose("ds.enable_sleep", "with --adam_offload they are in the CPU's memory for good, in OpenRLHF too")
    else:
        draft.set("train.optimizer_sleeps", True)


def _adapters(draft: RLDraft) -> None:
    """Translates the LoRA adapters of actor and critic."""
    translate_adapters(draft, critic=draft.has_critic)
    if not draft.value("ds.lora.rank", 0):
        return
    if draft.value("ds.load_in_4bit", False):
        loaded = {"critic": draft.has_critic, "reward model": draft.reward_model is not None}
        if others := " and ".join(name for name, there in loaded.items() if there):
            draft.change("ds.load_in_4bit", f"of the actor, not of the {others}")
