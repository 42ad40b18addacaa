"""Rules across settings: every setting either changes what a run does or is refused in that combination.

Importable without torch, so that a bad command line is answered at once. Each broken rule is one sentence: what was
set, which rule it breaks, and the flag that fixes it. What only files or models can tell is not checked here.
"""

from collections.abc import Iterator

from rollgrad.application.settings.rules.agent import agent_problems
from rollgrad.application.settings.rules.algorithm import (
    algorithm_problems,
    brought_problems,
    correction_problems,
    policy_loss_problems,
)
from rollgrad.application.settings.rules.asynchrony import async_problems
from rollgrad.application.settings.rules.centering import centering_problems
from rollgrad.application.settings.rules.cluster import cluster_problems, engine_length_problems, server_problems
from rollgrad.application.settings.rules.images import image_problems
from rollgrad.application.settings.rules.inputs import (
    data_problems,
    eval_problems,
    model_problems,
    optimizer_problems,
    prompt_form_problems,
    required_data_problems,
    required_eval_problems,
    reward_problems,
)
from rollgrad.application.settings.rules.kl import kl_problems, teacher_problems
from rollgrad.application.settings.rules.lora import lora_problems
from rollgrad.application.settings.rules.sampling import (
    replay_problems,
    rollout_problems,
    sampling_problems,
    shaping_problems,
    turn_estimator_problems,
    turn_problems,
)
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.validation import broken_rules
from rollgrad.domain.errors import ConfigurationError, raise_together

EVALUATED = (
    "agent.",
    "data.",
    "rollout.server_urls",
    "reward.remote_",
    "reward.judge_",
    "reward.format_pattern",
    "reward.failure_value",
)
"""Beginnings of the names of settings that evaluation reads, and whose conditions it checks."""


def validate(
    config: RLConfig, *, has_reward: bool = False, has_environment: bool = False, has_prompts: bool = False
) -> None:
    """Checks the settings of a training run.

    `has_reward`: the caller passes a reward object, which stands in for whatever reward is set. `has_environment`: the
    caller passes an environment, which rewards its own steps. `has_prompts`: the caller passes the prompts.

    Raises:
        ConfigurationError: rules are broken; the message has one a line.
    """
    raise_together(
        setting_errors(config, has_reward=has_reward, has_environment=has_environment, has_prompts=has_prompts)
    )


def setting_errors(
    config: RLConfig, *, has_reward: bool = False, has_environment: bool = False, has_prompts: bool = False
) -> list[ConfigurationError]:
    """Every rule that the settings of a training run break; arguments as for `validate`."""
    plays = has_environment or config.train.agent_func_path is not None

    def rules(config: RLConfig) -> Iterator[Iterator[str]]:
        yield model_problems(config)
        yield required_data_problems(config, has_prompts=has_prompts)
        yield algorithm_problems(config)
        yield brought_problems(config)
        yield policy_loss_problems(config)
        yield lora_problems(config)
        yield kl_problems(config)
        yield teacher_problems(config, has_environment=plays)
        yield correction_problems(config)
        yield centering_problems(config)
        yield async_problems(config)
        yield cluster_problems(config)
        yield server_problems(config)
        yield engine_length_problems(config, has_environment=plays)
        yield sampling_problems(config)
        yield replay_problems(config)
        yield shaping_problems(config, has_environment=plays)
        yield optimizer_problems(config)
        yield rollout_problems(config)
        yield data_problems(config)
        yield image_problems(config)
        yield reward_problems(config, config.data.prompt_dataset, has_reward=has_reward or plays)
        yield agent_problems(config, has_environment=plays)
        yield turn_estimator_problems(config, has_environment=plays)
        yield turn_problems(config, has_environment=plays)
        yield eval_problems(config)

    return broken_rules(config, rules)


def validate_evaluation(
    config: RLConfig, *, has_reward: bool = False, has_environment: bool = False, has_prompts: bool = False
) -> None:
    """Checks the settings that evaluation alone reads: the model, `eval`, `reward` and the form of the prompts;
    arguments as for `validate`, but that the prompts of the caller are held-out ones.

    Raises:
        ConfigurationError: rules are broken; the message has one a line.
    """
    raise_together(
        evaluation_errors(config, has_reward=has_reward, has_environment=has_environment, has_prompts=has_prompts)
    )


def evaluation_errors(
    config: RLConfig, *, has_reward: bool = False, has_environment: bool = False, has_prompts: bool = False
) -> list[ConfigurationError]:
    """Every rule that the settings of an evaluation break; arguments as for `validate`."""
    plays = has_environment or config.train.agent_func_path is not None

    def rules(config: RLConfig) -> Iterator[Iterator[str]]:
        yield model_problems(config)
        yield required_eval_problems(config, has_held_out=has_prompts)
        yield server_problems(config)
        yield engine_length_problems(config, has_environment=plays)
        yield prompt_form_problems(config)
        yield image_problems(config)
        yield reward_problems(config, config.eval.dataset or "", has_reward=has_reward or plays)
        yield agent_problems(config, has_environment=plays)
        yield turn_problems(config, has_environment=plays)
        yield eval_problems(config, has_held_out=has_prompts)

    return broken_rules(config, rules, EVALUATED)
