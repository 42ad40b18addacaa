"""Rules across settings: every setting either changes what a run does or is refused in that combination.

Importable without torch, so that a bad command line is answered at once. Each broken rule is one sentence: what was
set, which rule it breaks, and the flag that fixes it. What only files or models can tell is not checked here.
"""

from collections.abc import Iterator

from rollgrad.application.config import RLConfig
from rollgrad.application.rules_agent import agent_problems
from rollgrad.application.rules_algorithm import (
    algorithm_problems,
    correction_problems,
    kl_problems,
    policy_loss_problems,
)
from rollgrad.application.rules_async import async_problems
from rollgrad.application.rules_cluster import cluster_problems, engine_length_problems, server_problems
from rollgrad.application.rules_inputs import (
    data_problems,
    eval_problems,
    model_problems,
    optimizer_problems,
    prompt_form_problems,
    range_problems,
    required_data_problems,
    required_eval_problems,
    reward_problems,
)
from rollgrad.application.rules_lora import lora_problems
from rollgrad.application.rules_sampling import rollout_problems, sampling_problems, shaping_problems, turn_problems
from rollgrad.domain.catalogue import estimator_traits, policy_loss_traits
from rollgrad.domain.errors import ConfigurationError


def validate(config: RLConfig, *, has_reward: bool = False, has_environment: bool = False) -> None:
    """Checks the settings of a training run.

    `has_reward`: the caller passes a reward object, which stands in for whatever reward is set. `has_environment`: the
    caller passes an environment, which rewards its own steps.

    Raises:
        ConfigurationError: the first rule that is broken.
    """
    estimator_traits(config.algo.advantage.estimator)
    policy_loss_traits(config.actor.policy_loss_type)
    plays = has_environment or config.train.agent_func_path is not None
    _raise_first(
        model_problems(config),
        required_data_problems(config),
        range_problems(config),
        algorithm_problems(config),
        policy_loss_problems(config),
        lora_problems(config),
        kl_problems(config),
        correction_problems(config),
        async_problems(config),
        cluster_problems(config),
        server_problems(config),
        engine_length_problems(config, has_environment=plays),
        sampling_problems(config),
        shaping_problems(config, has_environment=plays),
        optimizer_problems(config),
        rollout_problems(config),
        data_problems(config),
        reward_problems(config, config.data.prompt_dataset, has_reward=has_reward or plays),
        agent_problems(config, has_environment=plays),
        turn_problems(config, has_environment=plays),
        eval_problems(config),
    )


def validate_evaluation(config: RLConfig, *, has_reward: bool = False, has_environment: bool = False) -> None:
    """Checks the settings that evaluation alone reads: the model, `eval`, `reward` and the form of the prompts.

    Raises:
        ConfigurationError: the first rule that is broken.
    """
    plays = has_environment or config.train.agent_func_path is not None
    _raise_first(
        model_problems(config),
        required_eval_problems(config),
        range_problems(config),
        server_problems(config),
        engine_length_problems(config, has_environment=plays),
        prompt_form_problems(config),
        reward_problems(config, config.eval.dataset or "", has_reward=has_reward or plays),
        agent_problems(config, has_environment=plays),
        turn_problems(config, has_environment=plays),
        eval_problems(config),
    )


def _raise_first(*rules: Iterator[str]) -> None:
    for problems in rules:
        for problem in problems:
            raise ConfigurationError(problem)
