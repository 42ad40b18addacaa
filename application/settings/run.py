"""A reinforcement-learning run: its sections.

Importable without torch. `entrypoints` builds the command line from these classes and reads them from YAML;
`application.settings.rules` holds the rules across settings.
"""

from attrs import define

from rollgrad.application.settings.sections.actor import ActorConfig
from rollgrad.application.settings.sections.agent import AgentConfig
from rollgrad.application.settings.sections.algo import AlgoConfig
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.cluster import ClusterConfig
from rollgrad.application.settings.sections.critic import CriticConfig
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.ds import DeepSpeedConfig
from rollgrad.application.settings.sections.eval import EvalConfig
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.sections.ref import ServedRefConfig
from rollgrad.application.settings.sections.reward import RewardConfig
from rollgrad.application.settings.sections.rollout import Engine, RolloutConfig
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.application.settings.sections.vllm import VLLMConfig
from rollgrad.domain.settings import Condition, section

WITH_VLLM = Condition(
    lambda here, run: run.rollout.engine is Engine.VLLM,
    "rollout.engine is {run.rollout.engine}",
    "set --rollout.engine vllm",
)


@define(kw_only=True)
class RLConfig:
    """A reinforcement-learning run."""

    actor: ActorConfig = section(ActorConfig, "The policy that is trained.")
    critic: CriticConfig = section(CriticConfig, "The value model of PPO.")
    ref: ServedRefConfig = section(ServedRefConfig, "The frozen reference.")
    algo: AlgoConfig = section(AlgoConfig, "The algorithm.")
    rollout: RolloutConfig = section(RolloutConfig, "How episodes are sampled.")
    agent: AgentConfig = section(AgentConfig, "Tools, attempts, and programs that play episodes.")
    vllm: VLLMConfig = section(VLLMConfig, "The engines of rollout.engine vllm.", only_if=WITH_VLLM)
    train: TrainConfig = section(TrainConfig, "How samples become optimizer steps.")
    cluster: ClusterConfig = section(
        ClusterConfig, "Processes of their own for models and engines, on this machine or many."
    )
    ds: DeepSpeedConfig = section(DeepSpeedConfig, "How models are divided over their processes.")
    data: DataConfig = section(DataConfig, "The prompts.")
    reward: RewardConfig = section(RewardConfig, "What a reply is worth.")
    eval: EvalConfig = section(EvalConfig, "Evaluation.")
    ckpt: CheckpointConfig = section(CheckpointConfig, "What is written where.")
    logger: LoggerConfig = section(LoggerConfig, "Where metrics go.")
