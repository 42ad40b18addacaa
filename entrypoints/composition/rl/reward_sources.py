"""The part of the composition root that judges: every kind of reward, and the run's reward, which may be several."""

from typing import Any

from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymReward
from rollgrad.adapters.rewards.model import ModelReward
from rollgrad.adapters.rewards.none import NoReward
from rollgrad.adapters.rewards.verifiers import VerifierReward
from rollgrad.entrypoints.composition.base import trainer_kind
from rollgrad.entrypoints.composition.engines import EngineContainer
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.lifetimes import LoopResource, closed_at_end
from rollgrad.entrypoints.composition.rl.rewards import (
    make_functions,
    make_judge,
    make_remote_reward,
    make_reward,
    make_reward_model,
)

base = EngineContainer


class RewardContainer(EngineContainer):
    """Adds the rewards of replies; `reward_spec` names the dataset of the prompts, which may bring its scorer."""

    reward_model = providers.Singleton(make_reward_model, base.config, base.shard, base.divide)
    reward_spec = base.config.provided.data.prompt_dataset
    reward_functions = providers.Singleton(make_functions, base.config)
    verifier = providers.Resource(
        closed_at_end,
        VerifierReward,
        base.config.provided.reward.verifier,
        timeout=base.config.provided.reward.timeout,
        format_pattern=base.config.provided.reward.format_pattern,
        isolation=base.config.provided.reward.isolation,
        unlabelled=base.config.provided.reward.majority_vote,
    )
    gym_reward = providers.Resource(
        closed_at_end,
        ReasoningGymReward,
        reward_spec,
        timeout=base.config.provided.reward.timeout,
        isolation=base.config.provided.reward.isolation,
    )
    model_reward = providers.Selector(
        providers.Callable(trainer_kind, base.config),
        process=providers.Singleton(
            ModelReward, providers.List(reward_model.provided.judge), timeout=base.config.provided.reward.timeout
        ),
        cluster=providers.Singleton(lambda cluster, make: cluster.reward(make), base.cluster, base.make),
    )
    remote_reward = LoopResource(make_remote_reward, base.config)
    judge = LoopResource(make_judge, base.config)
    reward_sources = providers.Dict(
        function=reward_functions.provider,
        verifier=verifier.provider,
        reasoning_gym=gym_reward.provider,
        model=model_reward.provider,
        remote=remote_reward.provider,
        judge=judge.provider,
        teacher=providers.Singleton(NoReward).provider,
        none=providers.Object(None).provider,
    )
    """The providers of rewards by their kind."""
    reward: providers.Provider[Any] = providers.Callable(make_reward, base.config, reward_spec, reward_sources)
