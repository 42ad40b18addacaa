"""Rules of processes and engines. See `validation`."""

from collections.abc import Iterator
from operator import attrgetter

from rollgrad.application.settings.derived import longest_sequence, ranks
from rollgrad.application.settings.engine_memory import engines_sleep
from rollgrad.application.settings.presets import traits_of
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraSync
from rollgrad.application.settings.sections.optimizer import Optim
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.application.settings.weight_backend import engines_without_actor, shares_gpus
from rollgrad.domain.addresses import address_problem

WHOLE = {
    "quantization": "quantised weights are made of whole tensors",
    "enable_eplb": "experts that are balanced change their places",
}
"""Engine arguments of vLLM with which a change of weights cannot go alone, and why."""


def cluster_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of the places of processes."""
    if config.rollout.engine is Engine.VLLM:
        yield from _sync_problems(config)
        yield from _delta_problems(config)
    if not config.cluster.enable:
        return
    yield from _division_problems(config)
    yield from _reward_model_problems(config)
    if config.train.colocate_all and config.train.async_enable:
        yield (
            "train.colocate_all lets engines sleep while models train, but with train.async_enable they never do: "
            "leave one of --train.colocate_all and --train.async_enable out."
        )
    for section, key in (("ds", "adam_offload"), ("ds", "param_offload"), ("cluster", "offload")):
        if config.train.optimizer_sleeps and getattr(getattr(config, section), key):
            yield (
                f"train.optimizer_sleeps is on with {section}.{key}, which keeps models in the CPU's memory for good: "
                f"leave one of --train.optimizer_sleeps and --{section}.{key} out."
            )
    if config.train.colocate_all and config.rollout.engine is Engine.VLLM:
        yield from _joint_problems(config)


def engine_length_problems(config: RLConfig, *, has_environment: bool) -> Iterator[str]:
    """Whether vLLM holds the longest sequence that the run can ask for."""
    held = config.vllm.max_model_len
    longest = longest_sequence(config, plays=has_environment or config.agent.plays)
    if held is not None and longest is not None and held < longest:
        yield (
            f"vllm.max_model_len is {held}, but the run can ask for {longest} tokens (data.max_prompt_tokens and the "
            "longest reply, or rollout.max_episode_tokens): raise --vllm.max_model_len, or leave it out."
        )


def server_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of servers that sample."""
    urls = config.rollout.server_urls
    if config.rollout.engine is not Engine.SERVER:
        return
    if not urls:
        yield "rollout.engine is server, but none is named: set --rollout.server_urls to their addresses."
    for index, url in enumerate(urls):
        if (problem := address_problem(url, "rollout.server_urls")) is not None:
            yield problem
        if url in urls[:index]:
            yield (
                f"rollout.server_urls names {url} twice, but each server is one engine: name it once in "
                "--rollout.server_urls."
            )
    if config.cluster.enable:
        yield (
            "rollout.engine is server with cluster.enable, which starts engines itself: set --rollout.engine vllm, or "
            "leave --cluster.enable out."
        )


def _sync_problems(config: RLConfig) -> Iterator[str]:
    """Ways for weights that GPUs which are shared, or are not, leave no room for."""
    backend, together = config.vllm.sync_backend, shares_gpus(config)
    if backend is SyncBackend.NCCL and together:
        yield (
            "vllm.sync_backend is nccl, but trainer and engines share GPUs, on each of which NCCL allows one process: "
            "set --vllm.sync_backend auto, or give the engines GPUs of their own (--cluster.enable without "
            "--train.colocate_all)."
        )
    if backend is SyncBackend.CUDA_IPC and not together:
        yield (
            "vllm.sync_backend is cuda_ipc, which goes within a GPU, but trainer and engines share none: set "
            "--vllm.sync_backend auto, or --train.colocate_all."
        )
    if backend is SyncBackend.CUDA_IPC and together and (lone := engines_without_actor(config)):
        yield (
            f"vllm.sync_backend is cuda_ipc, which goes within a GPU, but {lone} of the engines' GPUs have no process "
            "of the actor: set --vllm.sync_backend auto, or lower the number or the size of the engines."
        )


def _delta_problems(config: RLConfig) -> Iterator[str]:
    """Engines to which changes of weights cannot go alone."""
    backend, extra = config.vllm.sync_backend, config.vllm.extra or {}
    if not config.vllm.sync_delta:
        return
    if config.actor.lora.sync is LoraSync.ADAPTER:
        yield (
            "vllm.sync_delta is on with actor.lora.sync adapter, which brings no weights: leave one of "
            "--vllm.sync_delta and --actor.lora.sync out."
        )
    elif backend not in (SyncBackend.SHARED_MEMORY, SyncBackend.DISK):
        yield (
            f"vllm.sync_delta is on with vllm.sync_backend {backend}, but changes go through the CPU's memory or "
            "through files: set --vllm.sync_backend shared_memory or disk, or leave --vllm.sync_delta out."
        )
    if engines_sleep(config):
        yield (
            "vllm.sync_delta is on, but engines on the trainer's GPUs give up their weights while models train, so "
            "that all have to come back: leave --vllm.sync_delta out, or give the engines GPUs of their own "
            "(--cluster.enable without --train.colocate_all)."
        )
    for name in sorted(WHOLE.keys() & extra.keys()):
        if extra[name]:
            yield (
                f"vllm.sync_delta is on with vllm.extra.{name} {extra[name]}, but {WHOLE[name]}: leave one of "
                f"--vllm.sync_delta and --vllm.extra.{name} out."
            )


def _joint_problems(config: RLConfig) -> Iterator[str]:
    """Engines over the GPUs of neighbouring processes of the actor that are on several machines."""
    size, on_a_machine = config.vllm.gpus_per_engine, config.actor.num_gpus_per_node
    for first in range(0, min(config.vllm.num_engines * size, ranks(config)) - size + 1, size):
        if first // on_a_machine != (first + size - 1) // on_a_machine:
            yield (
                f"vllm.tensor_parallel_size {config.vllm.tensor_parallel_size} times vllm.pipeline_parallel_size "
                f"{config.vllm.pipeline_parallel_size} is {size} GPUs of an engine, which is on one machine, but "
                f"train.colocate_all puts engine {first // size} on those of the actor's processes {first} to "
                f"{first + size - 1}, of which each machine has {on_a_machine}: change --vllm.tensor_parallel_size, "
                "--vllm.pipeline_parallel_size or --actor.num_gpus_per_node."
            )
            return


def _division_problems(config: RLConfig) -> Iterator[str]:
    """Models whose processes do not make whole groups, and what groups cannot compute."""
    ds = config.ds
    for key in ("ds.sequence_parallel_size", "ds.tensor_parallel_size", "cluster.expert_parallel_size"):
        size = attrgetter(key)(config)
        # Reward models are never divided by the settings of `ds`.
        judging = ("reward",) if key.startswith("cluster.") else ()
        for model in ("actor", "critic", "ref", *judging):
            if ranks(config, model) % size:
                yield (
                    f"{key} is {size}, which does not divide the {ranks(config, model)} processes of the model "
                    f"{model!r}: change --{key}, or --{model}.num_gpus_per_node."
                )
    for name in ("aux_loss_coef", "router_z_loss_coef"):
        if ds.sequence_parallel_size > 1 and (coef := getattr(config.actor, name)) > 0:
            yield (
                f"actor.{name} is {coef} with ds.sequence_parallel_size {ds.sequence_parallel_size}, but losses of "
                f"routers are over whole sequences: leave one of --actor.{name} and --ds.sequence_parallel_size out."
            )
    if ds.tensor_parallel_size > 1:
        yield from _tensor_parallel_problems(config)


def _tensor_parallel_problems(config: RLConfig) -> Iterator[str]:
    """Limits of processes that share the layers of a model."""
    ds = config.ds
    if ds.sequence_parallel_size > 1:
        yield (
            f"ds.tensor_parallel_size is {ds.tensor_parallel_size} and ds.sequence_parallel_size "
            f"{ds.sequence_parallel_size}, but processes share layers or tokens, not both: leave one of "
            "--ds.tensor_parallel_size and --ds.sequence_parallel_size out."
        )
    if config.ref.offload:
        yield (
            f"ref.offload is on with ds.tensor_parallel_size {ds.tensor_parallel_size}, but a reference that shares "
            "layers stays on its GPUs: leave one of --ref.offload and --ds.tensor_parallel_size out."
        )
    if config.reward.offload:
        yield (
            f"reward.offload is on with ds.tensor_parallel_size {ds.tensor_parallel_size}, beside which a reward model "
            "is whole in each process: leave one of --reward.offload and --ds.tensor_parallel_size out."
        )
    for model in ("actor", "critic"):
        if getattr(config, model).optim is Optim.MUON:
            yield (
                f"ds.tensor_parallel_size is {ds.tensor_parallel_size} with {model}.optim muon, which needs matrices "
                f"whole: leave one of --ds.tensor_parallel_size and --{model}.optim out."
            )
    for model in ("actor", "critic"):
        if rank := getattr(config, model).lora.rank:
            yield (
                f"ds.tensor_parallel_size is {ds.tensor_parallel_size} with {model}.lora.rank {rank}, but layers with "
                f"adapters are not divided: leave one of --ds.tensor_parallel_size and --{model}.lora.rank out."
            )


def _reward_model_problems(config: RLConfig) -> Iterator[str]:
    """Settings of a reward model's processes where there is none, or nothing to share them with."""
    needs = {"reward model": "--reward.model_name_or_path", "critic": "--algo.advantage.estimator gae"}
    if config.reward.model_name_or_path is not None:
        del needs["reward model"]
    if "critic" in traits_of(config.algo.advantage.estimator).needs:
        del needs["critic"]
    for model, flag in needs.items():
        if config.train.colocate_critic_reward:
            yield (
                f"train.colocate_critic_reward is on, but there is no {model}: set {flag}, or leave "
                "--train.colocate_critic_reward out."
            )
