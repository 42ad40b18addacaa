"""Rules of LoRA. See `validation`."""

from collections.abc import Iterator

from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ALL_LINEAR, LoraSync
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.ds import GRADIENTS, PARAMETERS
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.vllm import SyncBackend

VLLM_RANK = 512
"""The highest that vLLM computes."""


def lora_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of the adapters."""
    lora = config.actor.lora
    if lora.sync is LoraSync.ADAPTER and config.rollout.engine is not Engine.VLLM:
        yield (
            f"actor.lora.sync is adapter, but rollout.engine is {config.rollout.engine}, and vLLM alone takes adapters "
            "without weights: set --rollout.engine vllm, or leave --actor.lora.sync out."
        )
    if lora.sync is LoraSync.ADAPTER and lora.rank > VLLM_RANK:
        yield (
            f"actor.lora.sync is adapter and actor.lora.rank is {lora.rank}, but vLLM computes adapters of rank "
            f"{VLLM_RANK} at most: lower --actor.lora.rank, or leave --actor.lora.sync out."
        )
    if lora.load_in_4bit and lora.sync is LoraSync.ADAPTER:
        yield (
            "actor.lora.load_in_4bit is on and actor.lora.sync is adapter, but vLLM would compute the adapters beside "
            "weights that are not quantised, which is another model: leave one of --actor.lora.load_in_4bit and "
            "--actor.lora.sync out."
        )
    if lora.load_in_4bit and config.cluster.strategy is Strategy.FSDP2:
        yield (
            "actor.lora.load_in_4bit is on and cluster.strategy is fsdp2, but weights in 4 bits are not divided: set "
            "--cluster.strategy deepspeed, or leave --actor.lora.load_in_4bit out."
        )
    elif lora.load_in_4bit and config.ds.zero_stage == PARAMETERS:
        yield (
            f"actor.lora.load_in_4bit is on and ds.zero_stage is {PARAMETERS}, but weights in 4 bits are not divided: "
            f"set --ds.zero_stage {GRADIENTS}, or leave --actor.lora.load_in_4bit out."
        )
    if lora.load_in_4bit and config.ref.offload and config.ref.model_name_or_path is None:
        yield (
            "actor.lora.load_in_4bit is on and so is ref.offload, but weights in 4 bits, which the reference shares "
            "with the actor, are not divided: leave one of --actor.lora.load_in_4bit and --ref.offload out."
        )
    backend = config.vllm.sync_backend
    if lora.sync is LoraSync.ADAPTER and backend not in (SyncBackend.AUTO, SyncBackend.SHARED_MEMORY):
        yield (
            f"actor.lora.sync is adapter and vllm.sync_backend is {backend}, but adapters reach vLLM through shared "
            "memory alone: leave one of --actor.lora.sync and --vllm.sync_backend out."
        )
    for at, targets in (("actor", lora.target_modules), ("critic", config.critic.lora.target_modules)):
        if targets != ALL_LINEAR and ALL_LINEAR[0] in targets:
            yield (
                f"{at}.lora.target_modules is {targets}, but {ALL_LINEAR[0]} already means every linear layer: leave "
                f"the other names out of --{at}.lora.target_modules."
            )
