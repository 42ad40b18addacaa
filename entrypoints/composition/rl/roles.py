"""The processes of the models and engines of reinforcement learning in a cluster."""

from rollgrad.application.settings.derived import ranks
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.entrypoints.composition.cluster import Role
from rollgrad.entrypoints.composition.rl.algorithm import critic_kind, reference_kind


def cluster_roles(config: RLConfig) -> dict[str, Role]:
    """Returns the processes of each model and of the engines."""

    def of_model(section: str, used: bool) -> Role:
        size = ranks(config, section) if used else 0
        return Role(size, min(size, getattr(config, section).num_gpus_per_node or size), lasting=True)

    engines = config.vllm.num_engines if config.rollout.engine is Engine.VLLM else 0
    return {
        "actor": of_model("actor", True),
        "critic": of_model("critic", critic_kind(config) == "loaded"),
        "reference": of_model("ref", reference_kind(config) == "loaded"),
        "reward": of_model("reward", config.reward.model_name_or_path is not None),
        "engines": Role(engines, engines),
    }


def colocated_roles(train: TrainConfig) -> list[set[str]]:
    """Returns the roles that share the same GPUs."""
    everything = {"actor", "critic", "reference", "reward", "engines"}
    return [
        everything if train.colocate_all else set(),
        {"actor", "reference"} if train.colocate_actor_ref else set(),
        {"critic", "reward"} if train.colocate_critic_reward else set(),
    ]
