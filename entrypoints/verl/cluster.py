"""Translates the processes of a verl command: models, which share their GPUs with vLLM's engines, and those."""

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.names_of_verl_seldom_set import ACTOR, ROLLOUT
from rollgrad.entrypoints.verl.draft import RLDraft
from rollgrad.entrypoints.verl.words import plain

ENGINE_ARGUMENTS = f"{ROLLOUT}.engine_kwargs.vllm."
SHARED = f"{ACTOR}.megatron.tensor_model_parallel_size"
EXPERTS = f"{ACTOR}.megatron.expert_model_parallel_size"
SEQUENCE = f"{ACTOR}.ulysses_sequence_parallel_size"
POLICY = f"{ACTOR}.fsdp_config.offload_policy"


def translate_cluster(draft: RLDraft) -> None:
    """Sets `cluster`, `ds`, `vllm`, `train.colocate_all`, and the actor's processes, which are those of all models.

    Raises:
        ConfigurationError: engines do not divide the GPUs.
    """
    gpus = draft.gpus
    _engines(draft, draft.engine_gpus)
    if gpus == 1 and not draft.overlaps:
        _one_process(draft)
        return
    draft.set("cluster.enable", True)
    if draft.overlaps:
        _apart(draft)
    else:
        draft.set("train.colocate_all", True)
    draft.set("actor.num_nodes", draft.value("trainer.nnodes"))
    draft.set("actor.num_gpus_per_node", draft.value("trainer.n_gpus_per_node"))
    if draft.submitted:
        draft.set("cluster.address", "auto")
    if draft.asks("actor_rollout_ref.nccl_timeout"):
        draft.set("cluster.timeout", draft.value("actor_rollout_ref.nccl_timeout"))
    layers = draft.positive(SHARED) if draft.megatron else 1
    _division(draft, layers)
    _offload(draft, whole=layers == 1)


def _one_process(draft: RLDraft) -> None:
    """Notes what one process has no use for."""
    names = (*draft.sleepers(), draft.ref_offload(), POLICY, SEQUENCE, SHARED, EXPERTS, f"{ACTOR}.strategy")
    for name in (*names, "actor_rollout_ref.nccl_timeout", "reward_model.model.fsdp_config.param_offload"):
        if name is not None and draft.asks(name) and draft.options[name].values != ("1",):
            draft.lose(name, "one process trains, which keeps its models where they compute")


def _apart(draft: RLDraft) -> None:
    """Translates models whose engines have GPUs of their own."""
    if draft.kl[0] > 0:
        draft.set("train.colocate_actor_ref", True)
    others = {"the critic": draft.has_critic, "the reward model": draft.has_reward_model}
    if names := " and ".join(name for name, there in others.items() if there):
        draft.changed.append(f"{names}: on GPUs of their own, as many as the actor has, in verl on the actor's")


def _division(draft: RLDraft, layers: int) -> None:
    """Translates how models are divided."""
    strategy = draft.value(f"{ACTOR}.strategy")
    sequence = draft.positive(SEQUENCE)
    if layers > 1:
        draft.set("cluster.strategy", "deepspeed")
        draft.set("ds.tensor_parallel_size", layers)
        draft.change(SHARED, "DeepSpeed divides the layers, and the optimizer's state by its stage 2")
        for name in (EXPERTS, SEQUENCE):
            if draft.asks(name) and draft.value(name) != 1:
                draft.lose(name, "processes share layers already, which is all that they can share")
        return
    draft.set("cluster.strategy", "fsdp2")
    if draft.megatron:
        draft.changed.append("FSDP2 divides the models, in verl Megatron")
    else:
        for name in (SHARED, EXPERTS):
            draft.lose(name, "verl reads it with Megatron only")
        if draft.value("model_engine") not in (None, "dp"):
            draft.change("model_engine", "FSDP2 divides the models")
        if strategy not in (None, "fsdp", "fsdp2"):
            draft.change(f"{ACTOR}.strategy", "FSDP2 divides the models")
    if sequence > 1:
        draft.set("ds.sequence_parallel_size", sequence)
    if draft.megatron and (experts := draft.positive(EXPERTS)) > 1:
        draft.set("cluster.expert_parallel_size", experts)


def _offload(draft: RLDraft, *, whole: bool) -> None:
    """Translates what is in the CPU's memory: for good with `offload_policy`, else while engines sample."""
    if draft.asks(POLICY) and whole:
        draft.set("cluster.offload", True)
        draft.change(POLICY, "the optimizer steps on the CPU, too")
    elif draft.overlaps:
        for name in draft.sleepers():
            draft.lose(name, "models keep their GPUs, for engines have their own: see cluster.offload")
    elif sleepers := draft.sleepers():
        draft.set("train.optimizer_sleeps", True)
        for name in sleepers:
            if "optimizer" not in name:
                draft.change(name, "what the optimizer keeps sleeps while engines sample, and the weights stay")
    if (switch := draft.ref_offload()) is not None:
        if draft.kl[0] == 0:
            draft.lose(switch, "no reference is loaded, in verl neither")
        elif whole:
            draft.set("ref.offload", True)
        else:
            draft.lose(switch, "a reference that shares layers stays on its GPUs")
    if draft.has_reward_model and whole and draft.asks("reward_model.model.fsdp_config.param_offload"):
        draft.set("reward.offload", True)


def _engines(draft: RLDraft, gpus: int) -> None:
    """Translates the engines.

    Raises:
        ConfigurationError: they do not divide the GPUs.
    """
    name = str(draft.value(f"{ROLLOUT}.name"))
    if name == "hf" and gpus == 1:
        draft.set("rollout.engine", "embedded")
        for key in ("gpu_memory_utilization", "tensor_model_parallel_size"):
            draft.lose(f"{ROLLOUT}.{key}", "the engine is not vLLM, but the trained model itself")
        return
    draft.set("rollout.engine", "vllm")
    if name != "vllm":
        draft.change(f"{ROLLOUT}.name", "vLLM samples")
    key, stages = f"{ROLLOUT}.tensor_model_parallel_size", draft.positive(f"{ROLLOUT}.pipeline_model_parallel_size")
    size = draft.positive(key) if key in draft.options else min(2, gpus)  # verl's default
    if gpus % (size * stages):
        raise ConfigurationError(
            f"{key} {size} times pipeline_model_parallel_size {stages} is {size * stages} GPUs of an engine, which do "
            f"not divide the {gpus} that engines have (trainer.n_gpus_per_node, trainer.nnodes): change one of them."
        )
    draft.set("vllm.tensor_parallel_size", size)
    draft.set("vllm.pipeline_parallel_size", stages)
    draft.set("vllm.num_engines", gpus // (size * stages))
    draft.set("vllm.gpu_memory_utilization", draft.value(f"{ROLLOUT}.gpu_memory_utilization"))
    for argument in ("max_num_batched_tokens", "enforce_eager", "enable_chunked_prefill"):
        if f"{ROLLOUT}.{argument}" in draft.options:
            draft.set(f"vllm.extra.{argument}", draft.value(f"{ROLLOUT}.{argument}"))
    for name, given in draft.options.items():
        if name.startswith(ENGINE_ARGUMENTS) and not given.unset:
            values = [plain(value) for value in given.values]
            draft.set(f"vllm.extra.{name.removeprefix(ENGINE_ARGUMENTS)}", values[0] if len(values) == 1 else values)
