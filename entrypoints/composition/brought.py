"""Adapters that a caller brings in the place of the run's own: whether they have the methods of their ports.

Does not own: putting them into a container (`lifetimes`).
"""

import inspect
from collections.abc import Mapping
from typing import Any

from rollgrad.domain.errors import ConfigurationError, raise_together
from rollgrad.domain.ports.agent_executor import AgentExecutor
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.checkpoint_store import CheckpointStore
from rollgrad.domain.ports.clock import Clock
from rollgrad.domain.ports.environment import ENVIRONMENT_METHODS, missing_methods
from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.domain.ports.models import PolicyModel, ReferenceModel, ValueModel
from rollgrad.domain.ports.prompt_source import PromptSource
from rollgrad.domain.ports.rollout_engine import RolloutEngine
from rollgrad.domain.ports.weight_channel import WeightChannel

PORTS: Mapping[str, type[Any]] = {
    "engine": RolloutEngine,
    "executor": AgentExecutor,
    "prompts": PromptSource,
    "policy": PolicyModel,
    "reference": ReferenceModel,
    "critic": ValueModel,
    "channel": WeightChannel,
    "sink": MetricSink,
    "checkpoints": CheckpointStore,
    "codec": ChatCodec,
    "clock": Clock,
}
"""The ports of adapters that a caller may bring, by their names."""


def check_brought(adapters: Mapping[str, Any], *, trains: bool) -> None:
    """Checks that adapters have the methods of their ports, and, where a run `trains`, that weights reach an engine of
    the caller's.

    Raises:
        ConfigurationError: they have not; all problems together.
    """
    problems = [problem for name, adapter in adapters.items() if (problem := _problem(name, adapter)) is not None]
    if trains and "engine" in adapters and "channel" not in adapters and not hasattr(adapters["engine"], "set_version"):
        problems.append(
            "engine is of your own, and no channel says how the policy's weights reach it: give channel, whose push "
            "brings them (rollgrad.domain.ports.weight_channel); an engine that reads the policy itself has "
            "set_version(version) instead."
        )
    raise_together([ConfigurationError(problem) for problem in problems])


def is_rows(prompts: Any) -> bool:
    """Returns whether prompts are rows, a list of mappings or a dataset by index, and no source of prompts."""
    if isinstance(prompts, list):
        return bool(prompts) and all(isinstance(row, Mapping) for row in prompts)
    return hasattr(prompts, "column_names") and hasattr(prompts, "__getitem__") and hasattr(prompts, "__len__")


def check_environment(environment: Any) -> None:
    """Checks that an environment is made anew for each episode, and has its methods.

    Raises:
        ConfigurationError: it is an object already, or a class that lacks some.
    """
    if not callable(environment):
        name = type(environment).__name__
        raise ConfigurationError(
            f"environment is one object of {name}, but each episode has its own: give the class, environment={name}."
        )
    if inspect.isclass(environment) and (missing := missing_methods(environment)):
        raise ConfigurationError(
            f"environment is the class {environment.__name__}, which has no {', '.join(missing)}: an environment has "
            f"the methods {', '.join(ENVIRONMENT_METHODS)}."
        )


def _problem(name: str, adapter: Any) -> str | None:
    """Returns what an adapter lacks; one that holds nothing needs no `close`."""
    port = PORTS.get(name)
    if port is None or adapter is None:
        return None
    if inspect.isclass(adapter):
        return f"{name} is the class {adapter.__name__}: give an object of it, such as {adapter.__name__}()."
    missing = [method for method in _methods(port) if not callable(getattr(adapter, method, None))]
    if not missing:
        return None
    return (
        f"{name} is a {type(adapter).__name__}, which has no {', '.join(missing)}: it takes the place of a "
        f"{port.__name__}, which {port.__module__} describes."
    )


def _methods(port: type[Any]) -> list[str]:
    own = [each for each in port.__mro__ if each.__module__.startswith("rollgrad.")]
    found = {name: None for each in own for name, value in vars(each).items() if inspect.isfunction(value)}
    return [name for name in found if name == "__len__" or not (name.startswith("_") or name == "close")]
