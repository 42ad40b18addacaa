"""Makes the executor of episodes from the settings `agent`, `rollout` and `train.agent_func_path`."""

from collections.abc import Callable
from typing import Any

from rollgrad.adapters.agents.command import CommandAgent
from rollgrad.adapters.agents.function import FunctionAgent
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.chat.tool_images import tool_image_reader
from rollgrad.adapters.environments.plain_methods import awaitable_environment
from rollgrad.adapters.openrlhf.environment import AgentInstanceEnvironment
from rollgrad.adapters.openrlhf.executor import CustomAgentExecutor
from rollgrad.adapters.openrlhf.loading import AgentFile
from rollgrad.application.episodes.chat_request import SessionLimits
from rollgrad.application.episodes.external_agent import ServedAgentExecutor
from rollgrad.application.episodes.multi_turn import EnvironmentFactory, MultiTurnExecutor
from rollgrad.application.episodes.tool_environment import ToolEnvironment
from rollgrad.application.settings.derived import longest_sample
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.agent_executor import AgentExecutor
from rollgrad.domain.ports.agent_program import AgentProgram
from rollgrad.domain.ports.environment import Environment
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.ports.rollout_engine import RolloutEngine
from rollgrad.entrypoints.composition.rl.tracing import Tracing
from rollgrad.entrypoints.composition.rl.training_server import MODEL, TrainingServer
from rollgrad.entrypoints.composition.tool_box import ToolBox


def executor_kind(config: RLConfig, environment: Any) -> str:
    """Returns the kind of executor."""
    if environment is not None:
        return "environment"
    if config.train.agent_func_path is not None:
        return "agent_file"
    if config.agent.command is not None:
        return "command"
    return "tools" if config.agent.converses else "single_turn"


def has_turns(config: RLConfig, environment: Any) -> bool:
    """Returns whether episodes have several turns."""
    return executor_kind(config, environment) != "single_turn"


def make_multi_turn(
    config: RLConfig,
    engine: RolloutEngine,
    codec: TemplateCodec,
    rewards: RewardSource | None,
    environment: Callable[[], Environment],
    tracing: Tracing,
) -> MultiTurnExecutor:
    """Returns an executor for environments that `environment` makes, whose methods may be plain functions; `rewards`
    judges those that give no reward."""
    return _turns(config, engine, codec, tracing, lambda params: awaitable_environment(environment()), rewards)


def make_tool_executor(
    config: RLConfig,
    engine: RolloutEngine,
    codec: TemplateCodec,
    rewards: RewardSource,
    box: ToolBox,
    tracing: Tracing,
) -> MultiTurnExecutor:
    """Returns an executor of conversations with the tools of `agent.tools`."""
    read_image = None
    if config.data.image_key is not None and config.agent.tools is not None:
        remedy = "give one that does (--data.chat_template), or have the tools of --agent.tools answer in texts"
        read_image = tool_image_reader(codec, ConfigurationError, remedy)

    async def environment(params: SamplingParams) -> Environment:
        return ToolEnvironment(
            tracing.tools(await box.open()),
            rewards=rewards,
            system_prompt=config.agent.system_prompt,
            attempts=config.agent.attempts,
            pass_threshold=config.reward.pass_threshold,
            end_of_turn=codec.end_of_turn,
            read_image=read_image,
            max_result_chars=config.agent.max_result_chars,
        )

    return _turns(config, engine, codec, tracing, environment)


def make_command_executor(
    config: RLConfig, program: CommandAgent, server: TrainingServer, codec: TemplateCodec, rewards: RewardSource | None
) -> ServedAgentExecutor:
    """Returns an executor for `program`, that of `agent.command`."""
    return _served(config, program, server, codec, rewards)


def make_file_executor(
    config: RLConfig,
    file: AgentFile,
    engine: RolloutEngine,
    codec: TemplateCodec,
    tokenizer: Any,
    server: TrainingServer,
    rewards: RewardSource | None,
    tracing: Tracing,
) -> AgentExecutor:
    """Returns the executor for `file`, that of `train.agent_func_path`; `rewards` judges episodes for which it gives no
    reward."""
    if file.program is not None:
        program = file.program if isinstance(file.program, AgentProgram) else FunctionAgent(file.program)
        return _served(config, program, server, codec, rewards)
    if file.environment is not None:
        return make_multi_turn(config, engine, codec, rewards, file.environment, tracing)
    if file.instance is not None:
        make = file.instance
        return _turns(config, engine, codec, tracing, lambda params: AgentInstanceEnvironment(make(), params), rewards)
    longest = longest_sample(config)
    return CustomAgentExecutor(file.executor, engine, codec, tokenizer, max_length=longest, rewards=rewards)


def _served(
    config: RLConfig,
    program: AgentProgram,
    server: TrainingServer,
    codec: TemplateCodec,
    rewards: RewardSource | None,
) -> ServedAgentExecutor:
    rollout = config.rollout
    server.serves(program)
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
    tracing: Tracing,
    environment: EnvironmentFactory,
    rewards: RewardSource | None = None,
) -> MultiTurnExecutor:
    rollout = config.rollout
    return MultiTurnExecutor(
        engine,
        codec,
        tracing.environments(environment),
        max_turns=rollout.max_turns,
        max_tokens=_longest(config, engine),
        max_seconds=rollout.max_episode_seconds,
        rewards=rewards,
    )


def _longest(config: RLConfig, engine: RolloutEngine) -> int | None:
    """Returns the largest number of tokens of an episode: as set, but never more than the model's positions."""
    limits = [config.rollout.max_episode_tokens, config.data.max_len, engine.max_tokens]
    return min((limit for limit in limits if limit is not None), default=None)
