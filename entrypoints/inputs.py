"""Checks of what a run reads besides models, before models are loaded and engines started.

Invariant: what is made here is what the run uses, so that nothing is read twice. Does not own: settings and paths
(`dry_run`), and what only a reply shows.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymPromptSource
from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import RollgradError, raise_together
from rollgrad.entrypoints.composition.adapters import check_adapters
from rollgrad.entrypoints.composition.data import note_repeated_prompts
from rollgrad.entrypoints.composition.engines import engine_kind
from rollgrad.entrypoints.composition.executors import executor_kind
from rollgrad.entrypoints.composition.packages import check_packages
from rollgrad.entrypoints.composition.rewards import check_reward_model, reward_kind
from rollgrad.entrypoints.composition.rl import RLContainer

TRAINING = ("prompts", "eval_prompts")
"""Providers of the prompts of a training run."""
PLAYERS = {"tools": "tool_box", "agent_file": "agent_file", "command": "agent_command"}
"""Providers of what plays episodes, by the kind of their executor."""


def check_inputs(container: RLContainer, prompts: Sequence[str] = TRAINING, *, trains: Any = None) -> None:
    """Reads the prompts of the providers `prompts`, makes what plays and judges episodes, as far as it needs no model
    and no engine, and asks the servers of `rollout.server_urls` how they sample.

    Args:
        container: of the run; what it makes here it does not make again.
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
        is_model = reward_kind(config, container.reward_spec()) == "model" and not container.reward.overridden
        reward = attempt(check_reward_model, config) if is_model else attempt(container.reward)
        if isinstance(reward, FunctionReward):
            for source in read.values():
                for prompt in _first(source):
                    attempt(reward.check, prompt)
    if sampler == Engine.VLLM:
        attempt(container.vllm_arguments)
    raise_together(errors)
    if sampler == Engine.SERVER:  # last, for one that does not answer is waited for
        container.served_engines()
        if trains is not None:
            container.served_backend()


def _first(source: Any) -> list[Prompt]:
    """Returns the first prompt, without moving the position of a source; none of a source that the caller brought."""
    if isinstance(source, DatasetPromptSource | ReasoningGymPromptSource):
        return [source.prompt(next(filter(source.survey.keeps, range(len(source.survey.lengths)))))]
    return source[:1] if isinstance(source, list) else []
