"""From settings to adapters: models, data, rewards, executors and sinks."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollgrad.adapters.agents.command import CommandAgent
from rollgrad.adapters.agents.function import FunctionAgent
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.checkpoints.names import METRICS_FILE, SAMPLES_FILE
from rollgrad.adapters.engines.embedded.decoding import check_decoding
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.models.torch.loading import (
    default_device,
    load_causal_lm,
    load_critic,
    load_generation_settings,
    resolve_dtype,
)
from rollgrad.adapters.models.torch.lora import add_lora
from rollgrad.adapters.models.torch.models import Optimize, TorchValue
from rollgrad.adapters.models.torch.muon import MuonSettings
from rollgrad.adapters.models.torch.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.openrlhf.environment import AgentInstanceEnvironment
from rollgrad.adapters.openrlhf.executor import CustomAgentExecutor
from rollgrad.adapters.openrlhf.loading import load_agent_file
from rollgrad.adapters.tracking.console import ConsoleSink
from rollgrad.adapters.tracking.jsonl import JsonlSink
from rollgrad.adapters.tracking.multi import MultiSink
from rollgrad.adapters.tracking.samples import SampleWriter
from rollgrad.adapters.tracking.tensorboard import TensorBoardSink
from rollgrad.application.episodes.chat_service import SessionLimits
from rollgrad.application.episodes.external_agent import ServedAgentExecutor
from rollgrad.application.episodes.multi_turn import EnvironmentFactory, MultiTurnExecutor
from rollgrad.application.episodes.tool_environment import ToolEnvironment
from rollgrad.application.settings.derived import longest_sample, longest_sequence, optimizer_steps_per_rollout
from rollgrad.application.settings.rules.inputs import REASONING_GYM
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig, LoraSync
from rollgrad.application.settings.sections.critic import CriticConfig
from rollgrad.application.settings.sections.optimizer import Optim
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.weight_backend import sync_backend
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.ports.agent_executor import AgentExecutor
from rollgrad.domain.ports.agent_program import AgentProgram
from rollgrad.domain.ports.environment import Environment
from rollgrad.domain.ports.prompt_source import PromptSource
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.ports.rollout_engine import RolloutEngine
from rollgrad.entrypoints.composition.tool_box import ToolBox
from rollgrad.entrypoints.composition.training_server import MODEL, TrainingServer

WEIGHTS_DIRECTORY = "weights"


def dataset_kind(spec: str | None) -> str:
    """Where prompts come from."""
    if spec is None:
        return "none"
    return "reasoning_gym" if spec.startswith(REASONING_GYM) else "dataset"


def make_rollouts(config: RLConfig, prompts: PromptSource) -> int:
    """Rollouts of the whole run."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    return math.ceil(len(prompts) * config.train.num_episodes / config.rollout.batch_size)


def make_optimizer(section: ActorConfig | CriticConfig, config: RLConfig, rollouts: int) -> OptimizerSettings:
    """A model's optimizer settings for the whole run."""
    trained = rollouts - (config.critic.freezing_steps if section is config.actor else 0)
    return OptimizerSettings(
        lr=section.adam.lr,
        betas=section.adam.betas,
        eps=section.adam.eps,
        weight_decay=section.adam.weight_decay,
        scheduler=section.lr_scheduler,
        warmup_ratio=section.lr_warmup_ratio,
        min_lr_ratio=section.min_lr_ratio,
        max_norm=section.max_norm,
        total_steps=trained * optimizer_steps_per_rollout(config),
        muon=MuonSettings(lr=section.muon.lr, momentum=section.muon.momentum) if section.optim is Optim.MUON else None,
        ema_beta=config.train.ema_beta if config.train.enable_ema and section is config.actor else None,
    )


def make_actor_model(config: RLConfig, name: str | None, flag: str, *, load_in_4bit: bool = False) -> Any:
    """A causal language model in the actor's format, or frozen and quantised; `name` None is the actor's own."""
    device = default_device()
    return load_causal_lm(
        name or config.actor.model_name_or_path,
        dtype=resolve_dtype(config.actor.dtype, device),
        device=device,
        flag=flag,
        load_in_4bit=load_in_4bit,
        float32_head=config.actor.float32_head,
    )


def make_trained_actor(config: RLConfig) -> Any:
    """The model that is trained, with adapters if there are to be some."""
    lora = config.actor.lora
    model = make_actor_model(config, None, "--actor.model_name_or_path", load_in_4bit=lora.load_in_4bit)
    if lora.rank:
        add_lora(model, lora, seed=config.train.seed)
    return model


def make_reference_model(config: RLConfig) -> Any:
    """The frozen reference: unless another one is named, what the actor starts as, quantised like it."""
    name = config.ref.model_name_or_path
    quantised = name is None and config.actor.lora.load_in_4bit
    return make_actor_model(config, name, "--ref.model_name_or_path", load_in_4bit=quantised)


def make_critic(
    config: RLConfig, tokenizer: Any, settings: OptimizerSettings, *, optimize: Optimize = MasterOptimizer
) -> TorchValue:
    """The value model, from the critic's or the actor's checkpoint."""
    device = default_device()
    model, head = load_critic(
        config.critic.model_name_or_path or config.actor.model_name_or_path,
        dtype=resolve_dtype(config.actor.dtype, device),
        device=device,
        flag="--critic.model_name_or_path",
    )
    return TorchValue(model, tokenizer, settings, head=head, optimize=optimize)


def eos_token_ids(generation: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a reply: the tokenizer's and those that the model's generation settings list."""
    configured = generation.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None})


def make_engine(config: RLConfig, model: Any, tokenizer: Any, codec: TemplateCodec) -> EmbeddedEngine:
    """The engine that samples from the trained model itself.

    Raises:
        ConfigurationError: it cannot sample from this model exactly.
    """
    check_decoding(model, "--actor.model_name_or_path", other_engine="--rollout.engine vllm")
    return EmbeddedEngine(
        model,
        eos_token_ids=eos_token_ids(model.generation_config, tokenizer),
        max_batch_size=config.rollout.max_batch_size,
        decode=codec.decode,
    )


def make_vllm_engine(config: RLConfig, tokenizer: Any, plays: bool) -> VLLMEngine:
    """The engine that samples in vLLM, started by this process."""
    return VLLMEngine(**vllm_settings(config, tokenizer, gpus=has_gpu(), plays=plays))


def has_gpu() -> bool:
    """Whether this process trains on one."""
    return default_device().type == "cuda"


def weights_directory(config: RLConfig) -> Path:
    """Where weights are written that go to the engines through files."""
    return Path(config.ckpt.output_dir).absolute() / WEIGHTS_DIRECTORY


def vllm_settings(config: RLConfig, tokenizer: Any, *, gpus: bool, plays: bool) -> dict[str, Any]:
    """Arguments of a `VLLMEngine`, which finds the actor's number format where it runs; `gpus` says whether it has any,
    `plays` whether episodes have several turns.

    Raises:
        ConfigurationError: weights cannot reach it as the settings want.
    """
    name = config.actor.model_name_or_path
    return {
        "model": name,
        "eos_token_ids": eos_token_ids(load_generation_settings(name), tokenizer),
        "dtype": str(config.actor.dtype),
        "max_tokens": config.vllm.max_model_len or longest_sequence(config, plays=plays),
        "max_batch_size": config.rollout.max_batch_size,
        "tensor_parallel_size": config.vllm.tensor_parallel_size,
        "pipeline_parallel_size": config.vllm.pipeline_parallel_size,
        "memory_fraction": config.vllm.gpu_memory_utilization,
        "sync_backend": sync_backend(config, gpus=gpus),
        "lora": config.actor.lora if config.actor.lora.sync is LoraSync.ADAPTER else None,
    }


def trainer_kind(config: RLConfig) -> str:
    """Where models are trained."""
    return "cluster" if config.cluster.enable else "process"


def engine_model_kind(config: RLConfig) -> str:
    """Whose weights the embedded engine reads."""
    return "own" if config.cluster.enable or config.train.async_enable else "shared"


def engine_kind(config: RLConfig) -> str:
    """What samples."""
    if config.rollout.engine is Engine.VLLM and config.cluster.enable:
        return "fleet"
    return str(config.rollout.engine)


def reference_model_kind(config: RLConfig) -> str:
    """Whose weights the reference of a run in one process reads."""
    return "actor" if config.actor.lora.rank and config.ref.model_name_or_path is None else "own"


def sleeper_kind(config: RLConfig) -> str:
    """Whether the engine gives its memory to the models that train."""
    return "engine" if config.train.colocate_all else "none"


def channel_kind(config: RLConfig) -> str:
    """How weights reach the engine."""
    kind = engine_kind(config)
    return engine_model_kind(config) if kind == Engine.EMBEDDED else kind


def weight_backend_kind(config: RLConfig, *, gpus: bool) -> str:
    """How weights reach vLLM; `gpus` says whether there are any.

    Raises:
        ConfigurationError: weights cannot reach it as the settings want.
    """
    return "adapter" if config.actor.lora.sync is LoraSync.ADAPTER else str(sync_backend(config, gpus=gpus))


def executor_kind(config: RLConfig, environment: Any) -> str:
    """What plays the episodes."""
    if environment is not None:
        return "environment"
    if config.train.agent_func_path is not None:
        return "agent_file"
    if config.agent.command is not None:
        return "command"
    return "tools" if config.agent.converses else "single_turn"


def has_turns(config: RLConfig, environment: Any) -> bool:
    """Whether episodes have several turns."""
    return executor_kind(config, environment) != "single_turn"


def make_multi_turn(
    config: RLConfig,
    engine: RolloutEngine,
    codec: TemplateCodec,
    rewards: RewardSource | None,
    environment: Callable[[], Environment],
) -> MultiTurnExecutor:
    """Plays episodes in environments that `environment` makes; `rewards` judges those that reward no episode."""
    return _turns(config, engine, codec, lambda params: environment(), rewards)


def make_tool_executor(
    config: RLConfig, engine: RolloutEngine, codec: TemplateCodec, rewards: RewardSource, box: ToolBox
) -> MultiTurnExecutor:
    """Plays conversations with the tools of `agent.tools`."""

    async def environment(params: SamplingParams) -> Environment:
        return ToolEnvironment(
            await box.open(),
            rewards=rewards,
            system_prompt=config.agent.system_prompt,
            attempts=config.agent.attempts,
            pass_threshold=config.reward.pass_threshold,
            end_of_turn=codec.end_of_turn,
        )

    return _turns(config, engine, codec, environment)


def make_command_executor(
    config: RLConfig, server: TrainingServer, codec: TemplateCodec, rewards: RewardSource | None
) -> ServedAgentExecutor:
    """Plays episodes with the program of `agent.command`."""
    assert config.agent.command is not None
    return _served(config, CommandAgent(config.agent.command), server, codec, rewards)


def make_agent_file(
    config: RLConfig,
    engine: RolloutEngine,
    codec: TemplateCodec,
    tokenizer: Any,
    server: TrainingServer,
    rewards: RewardSource | None,
) -> AgentExecutor:
    """What plays the episodes that the file of `train.agent_func_path` describes; `rewards` judges those for which it
    gives no reward."""
    assert config.train.agent_func_path is not None
    file = load_agent_file(config.train.agent_func_path)
    if file.program is not None:
        return _served(config, FunctionAgent(file.program), server, codec, rewards)
    if file.environment is not None:
        return make_multi_turn(config, engine, codec, rewards, file.environment)
    if file.instance is not None:
        make = file.instance
        return _turns(config, engine, codec, lambda params: AgentInstanceEnvironment(make(), params), rewards)
    limit = config.rollout.max_episode_tokens or longest_sample(config)
    return CustomAgentExecutor(file.executor, engine, codec, tokenizer, max_length=limit, rewards=rewards)


def _served(
    config: RLConfig,
    program: AgentProgram,
    server: TrainingServer,
    codec: TemplateCodec,
    rewards: RewardSource | None,
) -> ServedAgentExecutor:
    rollout = config.rollout
    return ServedAgentExecutor(
        program,
        server.service,
        codec,
        server.url,
        rewards,
        model=MODEL,
        limits=SessionLimits(max_turns=rollout.max_turns, max_tokens=_longest(config, server.engine)),
        max_seconds=rollout.max_episode_seconds,
    )


def _turns(
    config: RLConfig,
    engine: RolloutEngine,
    codec: TemplateCodec,
    environment: EnvironmentFactory,
    rewards: RewardSource | None = None,
) -> MultiTurnExecutor:
    rollout = config.rollout
    return MultiTurnExecutor(
        engine,
        codec,
        environment,
        max_turns=rollout.max_turns,
        max_tokens=_longest(config, engine),
        max_seconds=rollout.max_episode_seconds,
        rewards=rewards,
    )


def _longest(config: RLConfig, engine: RolloutEngine) -> int | None:
    """Tokens of an episode at most: as set, and never more than the model has positions."""
    limits = [config.rollout.max_episode_tokens, config.data.max_len, getattr(engine, "max_tokens", None)]
    return min((limit for limit in limits if limit is not None), default=None)


def make_checkpoints(config: RLConfig) -> LocalCheckpointStore:
    """Where models and training state are kept."""
    ckpt = config.ckpt
    return LocalCheckpointStore(
        Path(ckpt.output_dir),
        None if ckpt.state_dir is None else Path(ckpt.state_dir),
        keep_states=ckpt.keep_states,
        keep_models=ckpt.keep_models,
    )


def make_sample_log(config: RLConfig, codec: TemplateCodec) -> SampleWriter:
    """Where sampled texts go."""
    return SampleWriter(Path(config.ckpt.output_dir) / SAMPLES_FILE, codec.decode, config.logger.log_samples)


def make_sinks(config: RLConfig, rollouts: int) -> MultiSink:
    """Where metrics go."""
    output = Path(config.ckpt.output_dir)
    sinks: list[Any] = [JsonlSink(output / METRICS_FILE)]
    if config.logger.console:
        sinks.append(ConsoleSink(rollouts))
    if config.logger.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(Path(config.logger.tensorboard_dir)))
    return MultiSink(sinks)
