"""Checks of what a run reads besides models, before models are loaded and engines started.

Invariant: what is made here is what the run uses, so that nothing is read twice. Does not own: settings and paths
(`dry_run`), and what only a reply shows.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymPromptSource
from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.adapters.rewards.weighted import WeightedRewards
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import RollgradError, raise_together
from rollgrad.entrypoints.composition.adapters import check_adapters, check_weights, check_writer
from rollgrad.entrypoints.composition.engines import engine_kind
from rollgrad.entrypoints.composition.packages import check_packages
from rollgrad.entrypoints.composition.rl.container import RLContainer
from rollgrad.entrypoints.composition.rl.data import note_repeated_prompts
from rollgrad.entrypoints.composition.rl.executors import executor_kind
from rollgrad.entrypoints.composition.rl.rewards import check_reward_model, named_rewards, reward_kinds

TRAINING = ("prompts", "eval_prompts")
"""Providers of the prompts of a training run."""
PLAYERS = {"tools": "tool_box", "agent_file": "agent_file", "command": "agent_command"}
"""Providers of what plays episodes, by the kind of their executor."""


def check_inputs(container: RLContainer, prompts: Sequence[str] = TRAINING, *, trains: Any = None) -> None:
    """Reads the prompts of the providers `prompts`, makes what plays and judges episodes, as far as it needs no model
    and no engine, and asks the servers of `rollout.server_urls` how they sample.

    Args:
        container: container of the run; what it makes here it does not make again.
        prompts: names of providers.
        trains: settings of the training, whose packages must be installed; None trains nothing.

    Raises:
        RollgradError: one of them cannot be used, or a reward function cannot be called for a prompt; all problems
            together, and then those of servers.
    """
    errors: list[RollgradError] = []

    def attempt(make: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return make(*arguments)
        except RollgradError as error:
            errors.append(error)
        return None

    if trains is not None:
        attempt(check_packages, trains)
        attempt(check_adapters, trains)
        if not container.policy.overridden:
            attempt(check_writer, trains)
            attempt(check_weights, trains)
        if not (container.reference.overridden or container.critic.overridden):
            attempt(container.suits)
    sampler = None if container.engine.overridden else engine_kind(container.config())
    read = {name: attempt(container.providers[name]) for name in prompts}
    note_repeated_prompts(container.config(), container.environment(), *(read.get(name) for name in TRAINING))
    if not container.executor.overridden:  # else the caller's own plays and judges as it likes
        config = container.config()
        kind = executor_kind(config, container.environment())
        if kind in PLAYERS:
            attempt(container.providers[PLAYERS[kind]])
        for function in _functions(container, attempt):
            for source in read.values():
                for prompt in _first(source):
                    attempt(function.check, prompt)
    if sampler == Engine.VLLM:
        attempt(container.vllm_arguments)
    raise_together(errors)
    if sampler == Engine.SERVER:  # last, for one that does not answer is waited for
        container.served_engines()
        if trains is not None:
            container.served_backend()


def _functions(container: RLContainer, attempt: Callable[..., Any]) -> list[FunctionReward]:
    """Returns the reward functions of a run, when all its rewards but a model, which is not loaded here, were made."""
    config, spec = container.config(), container.reward_spec()
    if container.reward.overridden:
        reward = container.reward()
        sources = reward.sources if isinstance(reward, WeightedRewards) else {"": reward}
    else:
        if "model" in reward_kinds(config, spec):
            attempt(check_reward_model, config)
        sources = attempt(named_rewards, config, spec, container.reward_sources(), ["model"]) or {}
    return [source for source in sources.values() if isinstance(source, FunctionReward)]


def _first(source: Any) -> list[Prompt]:
    """Returns the first prompt, without moving the position of a source; none of a source that the caller brought."""
    if isinstance(source, DatasetPromptSource | ReasoningGymPromptSource):
        return [source.prompt(next(filter(source.survey.keeps, range(len(source.survey.lengths)))))]
    return source[:1] if isinstance(source, list) else []
