"""Rules of `rollgrad generate` and `rollgrad score`, which read the settings of a training run. See `validation`."""

from collections.abc import Iterator

from rollgrad.application.settings.derived import first_change
from rollgrad.application.settings.rules.cluster import engine_length_problems, server_problems
from rollgrad.application.settings.rules.inputs import (
    data_problems,
    model_problems,
    prompt_form_problems,
    required_data_problems,
    reward_problems,
)
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.agent import AgentConfig
from rollgrad.application.settings.validation import broken_rules
from rollgrad.domain.errors import ConfigurationError

SAMPLED = ("data.", "rollout.server_urls")
"""Beginnings of the names of settings that sampling reads, and whose conditions it checks."""
SCORED = ("reward.remote_", "reward.judge_", "reward.step_", "reward.format_pattern", "reward.failure_value")
"""Beginnings of the names of settings that scoring reads, and whose conditions it checks."""


def generation_errors(config: RLConfig) -> list[ConfigurationError]:
    """Returns every rule that the settings of sampling break."""

    def rules(config: RLConfig) -> Iterator[Iterator[str]]:
        yield model_problems(config)
        yield required_data_problems(config)
        yield server_problems(config)
        yield engine_length_problems(config, has_environment=False)
        yield data_problems(config)
        yield _single_replies(config)

    return broken_rules(config, rules, SAMPLED)


def scoring_errors(config: RLConfig, *, has_reward: bool = False) -> list[ConfigurationError]:
    """Returns every rule that the settings of scoring break. `has_reward`: the caller passes a reward object."""

    def rules(config: RLConfig) -> Iterator[Iterator[str]]:
        yield prompt_form_problems(config)
        yield reward_problems(config, config.data.prompt_dataset or "none", has_reward=has_reward)

    return broken_rules(config, rules, SCORED)


def _single_replies(config: RLConfig) -> Iterator[str]:
    changed = first_change(config.agent, AgentConfig())
    if changed:
        yield (
            f"agent.{changed} is {getattr(config.agent, changed)!r}, but generate samples single replies: leave "
            f"--agent.{changed} out."
        )
    if config.train.agent_func_path is not None:
        yield (
            f"train.agent_func_path is {config.train.agent_func_path!r}, but generate samples single replies: leave "
            "--train.agent_func_path out."
        )
