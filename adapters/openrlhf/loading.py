"""What an agent file offers."""

from collections.abc import Callable
from typing import Any

from attrs import frozen

from rollgrad.adapters.openrlhf.shim import MultiTurnAgentExecutor, installed
from rollgrad.adapters.system.python_file import load_python_file
from rollgrad.domain.errors import ConfigurationError

FLAG = "--train.agent_func_path"


@frozen
class AgentFile:
    """One of: `environment`, which makes a fresh `Environment`; `instance`, which makes a fresh OpenRLHF agent
    instance; `executor`, an OpenRLHF executor that plays by itself."""

    environment: Callable[[], Any] | None = None
    instance: Callable[[], Any] | None = None
    executor: Any = None


def load_agent_file(path: str) -> AgentFile:
    """Reads a Python file that defines a class `Environment` (see `domain.ports.environment`), or OpenRLHF's
    `AgentExecutor`.

    Raises:
        ConfigurationError: there is no such file, it cannot be imported, or it defines neither.
    """
    with installed():
        module = load_python_file(path, flag=FLAG)
    environment = getattr(module, "Environment", None)
    if environment is not None:
        return AgentFile(environment=environment)
    cls = getattr(module, "AgentExecutor", None)
    if cls is None:
        raise ConfigurationError(
            f"{FLAG} {path} defines neither a class Environment (reset, step, close) nor OpenRLHF's AgentExecutor."
        )
    executor = cls()
    overridden = getattr(cls, "execute", None) is not MultiTurnAgentExecutor.execute
    if isinstance(executor, MultiTurnAgentExecutor) and not overridden:
        return AgentFile(instance=executor.agent_instance_cls)
    return AgentFile(executor=executor)
