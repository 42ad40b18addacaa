"""Makes the engines that sample, and the channels that bring them the trained weights: for each kind of engine its
factory, its provider and its way of weights.

Another engine is one more factory here, and its branch in `sampling_engine` and `channel`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog

from rollgrad.adapters.chat.pictures import ImageRenderer, check_compared, check_vllm_images
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.engines.embedded.decoding import check_decoding
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.grammars import Grammars
from rollgrad.adapters.engines.embedded.weights import CopiedWeights, SharedWeights
from rollgrad.adapters.engines.vllm.builds import cpu_builds
from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.engines.vllm_server.engine import ServedEngine
from rollgrad.adapters.models.torch.allocator import FreedGPUMemory
from rollgrad.adapters.models.torch.experts.router_replay import install_router_replay
from rollgrad.adapters.models.torch.layers.images import leaves_tower_out
from rollgrad.adapters.models.torch.loading.loading import load_generation_settings, load_model_config
from rollgrad.adapters.system.event_loop import run_to_end
from rollgrad.adapters.weights.channel import EngineWeights, FleetWeights
from rollgrad.adapters.weights.cuda_ipc import cuda_ipc
from rollgrad.adapters.weights.delta import Changes
from rollgrad.adapters.weights.disk import Disk
from rollgrad.adapters.weights.nccl import NCCLBackend
from rollgrad.adapters.weights.shared_memory import shared_memory, shared_memory_adapter
from rollgrad.adapters.weights.transfer import Backend
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.engines.resuming import ContinuingEngine
from rollgrad.application.settings.derived import longest_sequence, sequences_at_once
from rollgrad.application.settings.engine_memory import engine_share, engines_sleep
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraSync, RouterReplay
from rollgrad.application.settings.sections.rollout import Engine, ServerSync
from rollgrad.application.settings.sections.train import PartialRollout
from rollgrad.application.settings.weight_backend import sync_backend
from rollgrad.domain.control.engine_health import FleetBounds
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.composition.base import BaseContainer, trainer_kind
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.lifetimes import LoopResource, closed_at_end
from rollgrad.entrypoints.composition.models import has_gpu, make_actor_model
from rollgrad.entrypoints.composition.outputs import make_profiler

log = structlog.get_logger(__name__)

WEIGHTS_DIRECTORY = "weights"

TURNS_SHARE = 0.6
"""Share of the memory that is free before a rollout for the embedded engine's keys and values, where they are freed
before the update."""

KEPT_SHARE = 0.25
"""Share of the free memory for them where they are kept while models are updated, which takes memory of its own."""

SERVER_RETURNS = 100
"""Number of times that a lost server may come back before it counts as broken and is not used any more."""


def eos_token_ids(generation: Any, tokenizer: Any) -> list[int]:
    """Returns every token that ends a reply: the tokenizer's and those that the model's generation settings list."""
    configured = generation.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None})


def reply_ends(generation: Any, tokenizer: Any) -> list[int]:
    """Returns `eos_token_ids`, for an engine; that there is none is logged."""
    ends = eos_token_ids(generation, tokenizer)
    if not ends:
        log.warning(
            "no token ends a reply: all go on to the greatest length",
            why="neither the tokenizer nor the model's generation settings name an eos token",
        )
    return ends


def make_grammars(config: RLConfig, tokenizer: Any) -> Grammars:
    """Returns what follows the forms of replies over the actor's tokens, as the engine does."""
    if config.rollout.engine is not Engine.EMBEDDED:  # vLLM allows no other token that ends a reply of a form
        return Grammars(tokenizer, [tokenizer.eos_token_id])
    return Grammars(tokenizer, eos_token_ids(load_generation_settings(config.actor.model_name_or_path), tokenizer))


def make_engine(
    config: RLConfig, model: Any, tokenizer: Any, codec: TemplateCodec, grammars: Grammars
) -> EmbeddedEngine:
    """Returns the engine that samples from the trained model itself.

    Raises:
        ConfigurationError: it cannot sample from this model exactly.
    """
    check_decoding(model, "--actor.model_name_or_path", other_engine="--rollout.engine vllm")
    replays = config.actor.router_replay is RouterReplay.ENGINE
    return EmbeddedEngine(
        model,
        eos_token_ids=reply_ends(model.generation_config, tokenizer),
        max_batch_size=sequences_at_once(config),
        decode=codec.decode,
        memory_share=TURNS_SHARE if sleeper_kind(config) == "engine" else KEPT_SHARE,
        grammars=grammars,
        replay=install_router_replay(model, "actor.router_replay is engine") if replays else None,
    )


def vllm_settings(config: RLConfig, tokenizer: Any, *, gpus: bool, plays: bool, without: str = "") -> dict[str, Any]:
    """Returns the arguments of a `VLLMEngine`, which finds the actor's number format where it runs; `gpus` says whether
    it has any, `without` why it computes on none (`cpu_builds`), `plays` whether episodes have several turns.

    Raises:
        ConfigurationError: weights cannot reach it as the settings want, it computes the model's images otherwise, or
            it is to record experts on a CPU.
        MissingExtraError: it cannot read the images of prompts.
    """
    name = config.actor.model_name_or_path
    check_experts_are_recorded(config, gpus=gpus)
    lora = config.actor.lora if config.actor.lora.sync is LoraSync.ADAPTER else None
    if config.data.image_key is not None:
        check_vllm_images(name, adapters=lora is not None)
    return {
        "model": name,
        "eos_token_ids": reply_ends(load_generation_settings(name), tokenizer),
        "dtype": str(config.actor.dtype),
        "max_tokens": config.vllm.max_model_len or longest_sequence(config, plays=plays),
        "max_batch_size": config.rollout.max_batch_size if gpus and not without else sequences_at_once(config),
        "tensor_parallel_size": config.vllm.tensor_parallel_size,
        "pipeline_parallel_size": config.vllm.pipeline_parallel_size,
        "memory_fraction": engine_share(config),
        "sync_backend": sync_backend(config, gpus=gpus, without=without),
        "lora": lora,
        "sleep_level": sleep_level(config),
        "records_experts": config.actor.router_replay is RouterReplay.ENGINE,
        "top_logprobs": config.algo.score_centering_top_k,
        "extra": {**({} if config.data.image_key else _without_tower(name)), **(config.vllm.extra or {})},
    }


def _without_tower(name: str) -> dict[str, Any]:
    """Returns the engine argument by which vLLM makes no tower for images where the trainer, of texts, has none, of
    whose weights it would get none in a push."""
    if not leaves_tower_out(load_model_config(name, flag="--actor.model_name_or_path")):
        return {}
    return {"limit_mm_per_prompt": {"image": 0, "video": 0}}


def check_experts_are_recorded(config: RLConfig, *, gpus: bool) -> None:
    """Checks that vLLM says to which experts it sent tokens, if that is asked for.

    Raises:
        ConfigurationError: there are no GPUs, without which vLLM has an older model runner that does not.
    """
    if config.actor.router_replay is RouterReplay.ENGINE and config.rollout.engine is Engine.VLLM and not gpus:
        raise ConfigurationError(
            "actor.router_replay is engine with rollout.engine vllm and without a GPU, where vLLM does not say to "
            "which experts it sent tokens: set --actor.router_replay trainer, or --rollout.engine embedded."
        )


def sleep_level(config: RLConfig) -> int:
    """Returns vLLM's level of sleep: 0 where it never sleeps, 1 where its weights outlast it, because a push brings the
    adapter alone, else 2, because a push of all weights follows."""
    if not engines_sleep(config):
        return 0
    return 1 if config.actor.lora.sync is LoraSync.ADAPTER else 2


def make_served_engines(config: RLConfig, tokenizer: Any, images: ImageRenderer | None) -> list[ServedEngine]:
    """Returns the engines of `rollout.server_urls`, ready to sample, from prompts with images if these are rendered.

    Raises:
        ConfigurationError: a server does not tell what it samples, or takes no images; the message says what
            to start.
    """
    if images is not None:
        check_compared(config.actor.model_name_or_path)
    ends = reply_ends(load_generation_settings(config.actor.model_name_or_path), tokenizer)
    engines = [
        ServedEngine(url, eos_token_ids=ends, vocabulary=len(tokenizer), max_requests=sequences_at_once(config))
        for url in config.rollout.server_urls
    ]
    _call_all(engines, ServedEngine.ready)
    if images is not None:
        _call_all(engines, partial(ServedEngine.require_images, renderer=images))
    return engines


def make_served_fleet(engines: list[ServedEngine]) -> EngineFleet:
    """Puts the servers behind one engine."""
    fleet = EngineFleet(engines, bounds=FleetBounds(max_restarts=SERVER_RETURNS))
    fleet.max_tokens = min((e.max_tokens for e in engines if e.max_tokens is not None), default=None)
    return fleet


def make_served_backend(config: RLConfig, engines: list[ServedEngine]) -> Backend:
    """Returns the backend that brings weights to the servers, all of which can take them.

    Raises:
        ConfigurationError: one of them cannot; the message says what to do.
    """
    directory, backend = None, cast(Backend, shared_memory)
    if config.rollout.server_sync is ServerSync.DISK:
        directory = weights_directory(config)
        directory.mkdir(parents=True, exist_ok=True)
        backend = Disk(directory)
    _call_all(engines, partial(ServedEngine.require_weights, directory=directory))
    return Changes(backend) if config.rollout.server_sync_delta else backend


def _call_all(engines: list[ServedEngine], doing: Callable[[ServedEngine], Coroutine[Any, Any, None]]) -> None:
    """Calls all servers, in an event loop of its own."""

    async def together() -> None:
        try:
            await asyncio.gather(*map(doing, engines))
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))

    run_to_end(together())


def engine_kind(config: RLConfig) -> str:
    """Returns the kind of engine."""
    if config.rollout.engine is Engine.VLLM and config.cluster.enable:
        return "fleet"
    return str(config.rollout.engine)


def engine_model_kind(config: RLConfig) -> str:
    """Returns the kind of the embedded engine's weights: the trainer's, shared, or its own."""
    return "own" if config.cluster.enable or config.train.async_enable else "shared"


def continuation_kind(config: RLConfig) -> str:
    """Returns the kind of engine wrapper: whether replies that a change of weights ends are continued."""
    return "continued" if config.train.partial_rollout is PartialRollout.RECOMPUTE else "plain"


def sleeper_kind(config: RLConfig) -> str:
    """Returns the kind of sleeper: whether the engine gives its memory to the models that train, where rollouts and
    updates take turns on one device."""
    in_process = config.rollout.engine is Engine.EMBEDDED and engine_model_kind(config) == "shared"
    return "engine" if in_process or config.train.colocate_all or engines_sleep(config) else "none"


def resting(config: RLConfig, policy: Any, critic: Any) -> list[Any]:
    """Returns what leaves memory to engines that wake: the optimizers of models, if they sleep, and what this process
    has freed of the GPU that it shares with an engine."""
    models = [model for model in (policy, critic) if model is not None] if config.train.optimizer_sleeps else []
    return models if config.cluster.enable or not engines_sleep(config) else [*models, FreedGPUMemory()]


def channel_kind(config: RLConfig) -> str:
    """Returns the kind of weight channel to the engine."""
    kind = engine_kind(config)
    return engine_model_kind(config) if kind == Engine.EMBEDDED else kind


def weight_backend_kind(config: RLConfig, *, gpus: bool, without: str = "") -> str:
    """Returns the kind of backend that brings weights to vLLM; `gpus` says whether there are GPUs, `without` why they
    do not count.

    Raises:
        ConfigurationError: weights cannot reach it as the settings demand.
    """
    if config.actor.lora.sync is LoraSync.ADAPTER:
        return "adapter"
    return str(sync_backend(config, gpus=gpus, without=without))


def of_changes(config: RLConfig, backend: Backend) -> Backend:
    """Returns the backend to vLLM's engines, which sends changes alone if that is asked for."""
    return Changes(backend) if config.vllm.sync_delta else backend


def weights_directory(config: RLConfig) -> Path:
    """Returns the directory of weights that go to the engines through files."""
    return Path(config.ckpt.output_dir).absolute() / WEIGHTS_DIRECTORY


base = BaseContainer


class EngineContainer(BaseContainer):
    """Adds the engine that samples from the trained model, and the channel that brings it new weights.

    `plays` says whether episodes have several turns.
    """

    plays: providers.Provider[bool] = providers.Dependency(instance_of=bool)
    engine_model = providers.Selector(
        providers.Callable(engine_model_kind, base.config),
        shared=base.actor_model,
        own=providers.Singleton(make_actor_model, base.config.provided.actor, images=base.image_renderer),
    )
    grammars = providers.Singleton(make_grammars, base.config, base.tokenizer)
    embedded_engine = providers.Singleton(make_engine, base.config, engine_model, base.tokenizer, base.codec, grammars)
    gpus = providers.Selector(
        providers.Callable(trainer_kind, base.config),
        process=providers.Callable(has_gpu),
        cluster=base.cluster.provided.gpus,
    )
    without = providers.Callable(cpu_builds)
    vllm_arguments = providers.Callable(
        vllm_settings, base.config, base.tokenizer, gpus=gpus, plays=plays, without=without
    )
    vllm_engine = providers.Resource(closed_at_end, lambda arguments: VLLMEngine(**arguments), vllm_arguments)
    fleet = LoopResource(
        lambda cluster, settings, at_once: cluster.engines(settings, at_once),
        base.cluster,
        vllm_arguments,
        base.config.provided.train.async_enable,
    )
    served_engines = providers.Singleton(make_served_engines, base.config, base.tokenizer, base.image_renderer)
    served_fleet = LoopResource(make_served_fleet, served_engines)
    served_backend = providers.Singleton(make_served_backend, base.config, served_engines)
    sampling_engine = providers.Selector(
        providers.Callable(engine_kind, base.config),
        embedded=embedded_engine,
        vllm=vllm_engine,
        fleet=fleet,
        server=served_fleet,
    )
    engine = providers.Selector(
        providers.Callable(continuation_kind, base.config),
        plain=sampling_engine,
        continued=providers.Singleton(ContinuingEngine, sampling_engine),
    )
    profile = providers.Singleton(make_profiler, base.config, base.used_cluster, engine)
    sleeper = providers.Selector(
        providers.Callable(sleeper_kind, base.config), engine=engine, none=providers.Object(None)
    )
    weight_backend = providers.Selector(
        providers.Callable(weight_backend_kind, base.config, gpus=gpus, without=without),
        adapter=providers.Object(shared_memory_adapter),
        shared_memory=providers.Object(shared_memory),
        nccl=providers.Singleton(NCCLBackend, base.config.provided.vllm.gpus_per_engine),
        cuda_ipc=providers.Callable(partial, cuda_ipc, workers=base.config.provided.vllm.gpus_per_engine),
        disk=providers.Singleton(Disk, providers.Callable(weights_directory, base.config)),
    )
    weight_way = providers.Singleton(of_changes, base.config, weight_backend)
    channel = providers.Selector(
        providers.Callable(channel_kind, base.config),
        shared=providers.Singleton(SharedWeights, engine),
        own=providers.Singleton(CopiedWeights, embedded_engine),
        vllm=providers.Singleton(EngineWeights, vllm_engine, backend=weight_way, temperature=base.temperature),
        fleet=providers.Singleton(FleetWeights, fleet, backend=weight_way, temperature=base.temperature),
        server=providers.Singleton(FleetWeights, served_fleet, backend=served_backend, temperature=base.temperature),
    )
