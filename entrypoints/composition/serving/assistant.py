"""Loads the model of an `Assistant`. Imports torch."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from attrs import evolve, frozen

from rollgrad.adapters.chat.image_files import image_bytes
from rollgrad.adapters.chat.pictures import (
    ImageRenderer,
    check_compared,
    check_vllm_images,
    load_processor,
    sees_images,
)
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.chat.tool_images import tool_image_reader
from rollgrad.adapters.engines.embedded.decoding import check_decoding
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.grammars import Grammars
from rollgrad.adapters.engines.vllm.division import division_problems
from rollgrad.adapters.engines.vllm.restarted import RestartedVLLM
from rollgrad.adapters.engines.vllm_server.engine import ServedEngine
from rollgrad.adapters.models.torch.loading.image_check import check_images
from rollgrad.adapters.models.torch.loading.loading import (
    default_device,
    load_causal_lm,
    load_generation_settings,
    load_model_config,
    load_tokenizer,
    resolve_dtype,
)
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.planning.shape import model_shape
from rollgrad.adapters.system.event_loop import run_to_end
from rollgrad.adapters.weights.channel import FleetWeights
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.episodes.assistant import Assistant
from rollgrad.application.settings.model_shape import ModelShape
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.control.engine_health import FleetBounds
from rollgrad.domain.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    EngineError,
    MissingExtraError,
    raise_together,
)
from rollgrad.domain.ports.rollout_engine import RolloutEngine
from rollgrad.entrypoints.composition.chat import template_values
from rollgrad.entrypoints.composition.engines import reply_ends
from rollgrad.entrypoints.composition.serving.arguments import AssistantArguments
from rollgrad.entrypoints.composition.serving.reload import ModelReload, Push
from rollgrad.entrypoints.composition.tool_box import ToolBox

log = structlog.get_logger(__name__)
FLAG = "--model"
VLLM_MEMORY = 0.9
"""Share of a GPU's memory that vLLM takes by default."""
HERE = FleetBounds(dead_after=600.0)
"""Bounds of an engine on this machine: where its processes died is seen at once, and one that is silent computes a long
prompt, which takes minutes on a CPU."""
OTHER_PARAMETERS = "The newer checkpoint has other parameters than the model that is served: restart."


@frozen(kw_only=True, eq=False)
class LoadedAssistant:
    """An assistant and its parts."""

    assistant: Assistant
    codec: TemplateCodec
    tools: ToolBox
    name: str
    close_engine: Callable[[], Awaitable[None]]
    """Ends what the engine holds."""
    check: Callable[[], Awaitable[None]] | None
    """Raises `EngineError` if the engine cannot serve requests; None for an engine that cannot fail by itself."""
    until_hopeless: Callable[[], Awaitable[None]] | None
    """Raises `EngineError` as soon as the engine never will serve again; None for an engine that cannot fail by
    itself."""
    reload: ModelReload | None
    """Brings the engine newer weights; None where others bring them."""

    async def aclose(self) -> None:
        """Closes tools and engine, in the event loop that used them."""
        try:
            await self.tools.aclose()
        finally:
            await self.close_engine()


def load_assistant(arguments: AssistantArguments, *, follow: Path | None = None) -> LoadedAssistant:
    """Returns the model with its tools. `follow`: output directory of the run whose checkpoints `reload` loads.

    Raises:
        ConfigurationError: a setting, a tool or the model cannot be used.
    """
    tools = ToolBox(arguments.tools, arguments.python_isolation, flag="--tools", isolation_flag="--python_isolation")
    tokenizer = load_tokenizer(arguments.model, flag=FLAG)
    if not tokenizer.chat_template:
        raise ConfigurationError(
            f"{FLAG} {arguments.model} has no chat template, so it cannot chat: name a chat model."
        )
    variables = template_values(arguments.chat_template_kwargs, tokenizer, "chat_template_kwargs")
    sampler = ENGINES[arguments.engine](arguments, tokenizer, TemplateCodec(tokenizer))
    images = _image_renderer(arguments, tokenizer, sampler)
    codec = TemplateCodec(tokenizer, variables, images)
    engine = sampler.engine
    read_image: Callable[[Any], bytes] | None = None if images is None else image_bytes
    if images is not None and arguments.tools is not None:
        read_image = tool_image_reader(
            codec, DataError, "name a model whose template does, or have the tools of --tools answer in texts"
        )
    assistant = Assistant(
        engine,
        codec,
        tools.open,
        params=arguments.params(),
        draws_seeds=arguments.seed is None,
        system_prompt=arguments.system_prompt,
        max_turns=arguments.max_turns,
        max_tokens=engine.max_tokens,
        max_result_chars=arguments.max_result_chars,
        read_image=read_image,
    )
    name = Path(arguments.model).resolve().name or arguments.model
    reload = None
    if sampler.push is not None:
        load = partial(_load_newer, arguments, _served_shape(arguments))
        reload = ModelReload(engine, sampler.push, load, broken=sampler.broken, model=arguments.model, follow=follow)
    return LoadedAssistant(
        assistant=assistant,
        codec=codec,
        tools=tools,
        name=name,
        close_engine=sampler.close,
        check=sampler.check,
        until_hopeless=sampler.until_hopeless,
        reload=reload,
    )


def _image_renderer(arguments: AssistantArguments, tokenizer: Any, sampler: "_Sampler") -> ImageRenderer | None:
    """Returns what renders images in messages. None if there are none to render: the model sees no images, or it is not
    known to be computed as its own code does, which is logged."""
    if not sees_images(arguments.model):
        return None
    try:
        renderer = ImageRenderer(load_processor(arguments.model, tokenizer, flag=FLAG))
        sampler.check_images(renderer)
    except (CheckpointError, ConfigurationError, MissingExtraError, EngineError) as error:
        log.warning("messages with images are refused", model=arguments.model, reason=str(error.__cause__ or error))
        return None
    return renderer


def _load(arguments: AssistantArguments, name: str) -> Any:
    sampled_on = default_device()
    # vLLM takes most of a GPU's memory, so what it is brought passes through the CPU's.
    device = torch.device("cpu") if arguments.engine is Engine.VLLM else sampled_on
    return load_causal_lm(
        name,
        dtype=resolve_dtype(arguments.dtype, sampled_on),
        device=device,
        flag=FLAG,
        images=sees_images(arguments.model),
    ).eval()


def _load_newer(arguments: AssistantArguments, shape: ModelShape | None, name: str) -> Any:
    """Loads a checkpoint that takes the place of a model of this shape; None leaves the comparison to the engine.

    Raises:
        ConfigurationError: it is of another shape, of which vLLM would only know when it has lost its own weights.
    """
    if shape is not None and _shape(name) != shape:
        raise ConfigurationError(OTHER_PARAMETERS)
    return _load(arguments, name)


def _served_shape(arguments: AssistantArguments) -> ModelShape | None:
    if arguments.engine is not Engine.VLLM:
        return None
    try:
        return _shape(arguments.model)
    except CheckpointError:  # vLLM serves models that transformers does not know, which cannot be loaded again either
        return None


def _shape(name: str) -> ModelShape:
    return evolve(model_shape("model", name), stored=0)  # engines take weights in any format


@frozen(kw_only=True, eq=False)
class _Sampler:
    """An engine, and the functions of its life: they end what it holds, check that it computes images as the model's
    own code does, bring it weights, check whether it can serve requests, wait until it can serve none any more, and say
    whether it waits for whole weights."""

    engine: RolloutEngine
    close: Callable[[], Awaitable[None]]
    check_images: Callable[[ImageRenderer], None]
    push: Push | None = None
    check: Callable[[], Awaitable[None]] | None = None
    until_hopeless: Callable[[], Awaitable[None]] | None = None
    broken: Callable[[], bool] = lambda: False


def _embedded(arguments: AssistantArguments, tokenizer: Any, codec: TemplateCodec) -> _Sampler:
    model = _load(arguments, arguments.model)
    check_decoding(model, FLAG, other_engine="--engine vllm")
    ends = reply_ends(model.generation_config, tokenizer)
    engine = EmbeddedEngine(
        model,
        eos_token_ids=ends,
        decode=codec.decode,
        grammars=Grammars(tokenizer, ends),
        **_batch_size(arguments),
    )

    async def close() -> None:
        """Does nothing: the engine holds nothing but memory."""

    async def push(newer: Any, version: int) -> None:
        if _shapes(newer) != _shapes(model):  # before the first is copied
            raise ConfigurationError(OTHER_PARAMETERS)
        await engine.load_weights(newer.named_parameters(), version)

    def seen(renderer: ImageRenderer) -> None:
        check_images(model, renderer, arguments.model, FLAG)

    return _Sampler(engine=engine, close=close, check_images=seen, push=push)


def _shapes(model: Any) -> dict[str, Any]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _vllm(arguments: AssistantArguments, tokenizer: Any, codec: TemplateCodec) -> _Sampler:
    if arguments.num_engines is not None:
        return _cluster(arguments, tokenizer)
    fleet = EngineFleet([RestartedVLLM(_vllm_settings(arguments, tokenizer))], bounds=HERE)
    return _restarted(arguments, tokenizer, fleet, fleet.aclose)


def _vllm_settings(arguments: AssistantArguments, tokenizer: Any) -> dict[str, Any]:
    sizes = arguments.tensor_parallel_size or 1, arguments.pipeline_parallel_size or 1
    here = None if arguments.num_engines is not None else torch.cuda.device_count() or None
    extra = arguments.vllm_extra or {}
    if max(sizes) > 1:
        config = load_model_config(arguments.model, flag=FLAG)
        problems = division_problems(config, *sizes, section="", extra=extra, gpus=here)
        raise_together([ConfigurationError(problem) for problem in problems])
    return {
        "model": arguments.model,
        "eos_token_ids": reply_ends(load_generation_settings(arguments.model), tokenizer),
        "dtype": str(arguments.dtype),
        "max_tokens": arguments.max_model_len,
        "tensor_parallel_size": sizes[0],
        "pipeline_parallel_size": sizes[1],
        "memory_fraction": arguments.gpu_memory_utilization or VLLM_MEMORY,
        "sleep_level": 0,
        "extra": extra,
        **_batch_size(arguments),
    }


def _batch_size(arguments: AssistantArguments) -> dict[str, Any]:
    """Returns the engine's argument if it is set; each has a default of its own."""
    return {} if arguments.max_batch_size is None else {"max_batch_size": arguments.max_batch_size}


def _untrained(model: Any, tokenizer: Any) -> TorchPolicy:
    """Returns a policy for engines to take the weights of; a fleet keeps it, so it has no float32 copies to step."""
    themselves = {parameter: parameter for parameter in model.parameters()}
    optimize = partial(MasterOptimizer, masters=themselves)
    return TorchPolicy(model, tokenizer, OptimizerSettings(lr=0.0), optimize=optimize)


def _cluster(arguments: AssistantArguments, tokenizer: Any) -> _Sampler:
    """Starts engines in a Ray cluster: requests go to the least loaded, and one that dies is replaced."""
    from rollgrad.entrypoints.composition.cluster import Cluster, Role

    count, config = arguments.num_engines or 1, RLConfig()
    config.cluster.address = arguments.cluster_address
    config.vllm.tensor_parallel_size = arguments.tensor_parallel_size or 1
    config.vllm.pipeline_parallel_size = arguments.pipeline_parallel_size or 1
    cluster = Cluster(config, {"engines": Role(count, count)}, [])
    try:
        fleet = cluster.engines(_vllm_settings(arguments, tokenizer), False)
    except BaseException:
        cluster.close()
        raise

    async def close() -> None:
        try:
            await fleet.aclose()
        finally:
            cluster.close()

    return _restarted(arguments, tokenizer, fleet, close)


def _restarted(
    arguments: AssistantArguments, tokenizer: Any, fleet: EngineFleet, close: Callable[[], Awaitable[None]]
) -> _Sampler:
    """Returns a fleet, whose engines are replaced when they die."""
    weights = FleetWeights(fleet)
    transferring = False

    async def push(newer: Any, version: int) -> None:
        nonlocal transferring
        transferring = True
        try:
            await weights.push(_untrained(newer, tokenizer), version)
        finally:
            transferring = False

    def broken() -> bool:
        """Returns whether no engine has weights and none that lives is being given any."""
        return not (fleet.health.serving or (transferring and fleet.health.living))

    async def check() -> None:
        if broken():
            raise EngineError(f"No engine serves; the fleet is: {fleet.health.summary()}.")
        await fleet.takers()  # before the first request nothing else asks the engines how they are

    return _Sampler(
        engine=fleet,
        close=close,
        check_images=lambda renderer: check_vllm_images(arguments.model),
        push=push,
        check=check,
        until_hopeless=fleet.until_hopeless,
        broken=broken,
    )


def _server(arguments: AssistantArguments, tokenizer: Any, codec: TemplateCodec) -> _Sampler:
    assert arguments.server_url is not None
    ends = reply_ends(load_generation_settings(arguments.model), tokenizer)
    engine = ServedEngine(arguments.server_url, eos_token_ids=ends, vocabulary=len(tokenizer), flag="--server_url")

    async def once(work: Awaitable[None]) -> None:
        try:
            await work
        finally:
            await engine.close()  # its connections belong to this event loop

    def seen(renderer: ImageRenderer) -> None:
        check_compared(arguments.model)
        run_to_end(once(engine.require_images(renderer)))

    run_to_end(once(engine.ready()))
    return _Sampler(engine=engine, close=engine.close, check_images=seen, check=engine.check)


ENGINES: Mapping[Engine, Callable[[AssistantArguments, Any, TemplateCodec], _Sampler]] = {
    Engine.EMBEDDED: _embedded,
    Engine.VLLM: _vllm,
    Engine.SERVER: _server,
}
