"""Loading of agent files."""

import inspect
from collections.abc import Callable
from typing import Any

from attrs import frozen

from rollgrad.adapters.openrlhf.shim import MultiTurnAgentExecutor
from rollgrad.adapters.system.python_file import load_python
from rollgrad.adapters.system.stand_ins import install
from rollgrad.application.foreign import foreign_code
from rollgrad.application.settings.function_path import FunctionPath
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.agent_program import AgentProgram
from rollgrad.domain.ports.environment import Environment, missing_methods

FLAG = "--train.agent_func_path"
EXECUTE = ("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine")
"""Keyword arguments of `execute`."""


@frozen
class AgentFile:
    """Content of an agent file, of which it has one."""

    program: Callable[..., Any] | AgentProgram | None = None
    """A function (or an `AgentProgram`) that plays an episode as a client of the agent server."""
    environment: Callable[[], Any] | None = None
    """Makes a fresh `Environment`."""
    instance: Callable[[], Any] | None = None
    """Makes a fresh OpenRLHF agent instance."""
    executor: Any = None
    """An OpenRLHF executor that plays by itself."""


def load_agent_file(path: str) -> AgentFile:
    """Reads a Python file or module that defines a class `Environment` (see `domain.ports.environment`), a function
    `run_agent` (see `adapters.agents.function`) or an `AgentProgram` of that name, or OpenRLHF's `AgentExecutor`.
    `FILE:NAME` takes a class or function of another name for one of them.

    Raises:
        ConfigurationError: there is no such file, it cannot be imported, it defines none of them, or its
            `AgentExecutor` is written for OpenRLHF 0.8 or earlier.
    """
    install()
    place = FunctionPath.parse(path)
    module = load_python(place.file, flag=FLAG)
    if place.name is not None:
        return _named(getattr(module, place.name, None), path)
    program = getattr(module, "run_agent", None)
    if program is not None:
        return _program_of(program, path)
    environment = getattr(module, "Environment", None)
    if environment is Environment:  # the file has imported the port; its own class has another name
        environment = None
    cls = getattr(module, "AgentExecutor", None)
    # An agent file may import a class Environment from elsewhere; a class that it defines itself has precedence.
    if environment is not None and (cls is None or environment.__module__ == module.__name__):
        return _environment_of(environment, path)
    if cls is None and "step" in vars(module):
        raise ConfigurationError(
            f"{FLAG} {path} defines a function step, as in OpenRLHF 0.8: make it the method of a class "
            "AgentInstance(AgentInstanceBase), as docs/migration.md#agent-files shows."
        )
    if cls is None:
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigurationError(
            f"{FLAG} {path} defines no class Environment (reset, step, close), no function run_agent(task), and no "
            f"AgentExecutor of OpenRLHF's (it defines {', '.join(own) or 'none'}): call it by one of these names, or "
            f"name it with {FLAG} {path}:NAME."
        )
    return _executor_of(cls, path)


def _named(found: Any, path: str) -> AgentFile:
    """Returns what a file has under the name of `path`, by what it can do."""
    if not inspect.isclass(found):
        if not callable(found) and not isinstance(found, AgentProgram):
            raise ConfigurationError(
                f"{FLAG} is {path!r}, of which the name is no class Environment (reset, step, close) and no function "
                "of a task: check it."
            )
        return _program_of(found, path)
    return _executor_of(found, path) if hasattr(found, "execute") else _environment_of(found, path)


def _program_of(found: Any, path: str) -> AgentFile:
    if not isinstance(found, AgentProgram) and not _takes(found, 1):
        raise ConfigurationError(
            f"{FLAG} is {path!r}, a function that cannot be called with the task alone: write run_agent(task)."
        )
    return AgentFile(program=found)


def _environment_of(found: Any, path: str) -> AgentFile:
    if inspect.isclass(found) and (missing := missing_methods(found)):
        raise ConfigurationError(
            f"{FLAG} is {path!r}, a class without {', '.join(missing)}: an environment has reset, step and close."
        )
    if not _takes(found, 0):
        raise ConfigurationError(
            f"{FLAG} is {path!r}, whose environment wants arguments, but one is made for each episode without any: "
            "give them defaults, and read in reset(prompt) what depends on the prompt."
        )
    return AgentFile(environment=found)


def _takes(function: Any, count: int) -> bool:
    """Returns whether a function can be called with `count` arguments by position; True for one without a signature."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _executor_of(cls: Any, path: str) -> AgentFile:
    executor = _made(cls, path)
    if isinstance(executor, MultiTurnAgentExecutor) and cls.execute is MultiTurnAgentExecutor.execute:
        return AgentFile(instance=executor.agent_instance_cls)
    return AgentFile(executor=executor)


def _made(cls: Any, path: str) -> Any:
    """Returns an instance of the file's `AgentExecutor`, whose signatures must be the current ones."""
    if not inspect.isclass(cls):
        raise ConfigurationError(
            f"{FLAG} {path}: AgentExecutor is a {type(cls).__name__}, as in OpenRLHF 0.8, but it must be a class: "
            "leave @ray.remote out."
        )
    wanted = [
        parameter.name
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if wanted:
        plays = "execute" in vars(cls)
        fix = (
            f"let execute() take what it needs of {', '.join(EXECUTE)}, and return the episode's dict rather than put "
            "it in a queue."
            if plays
            else "derive it from MultiTurnAgentExecutor, whose __init__ takes the class of the agent instance alone."
        )
        raise ConfigurationError(
            f"{FLAG} {path}: AgentExecutor.__init__ takes {', '.join(wanted)}, as in OpenRLHF 0.8, but an executor is "
            f"made without arguments: {fix}"
        )
    execute = getattr(cls, "execute", None)
    if not callable(execute):
        raise ConfigurationError(
            f"{FLAG} {path}: AgentExecutor has no `async def execute(self, {', '.join(EXECUTE)})`: add it, or derive "
            "from MultiTurnAgentExecutor."
        )
    parameters = inspect.signature(execute).parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    missing = [] if free else [name for name in EXECUTE if name not in parameters]
    if missing:
        raise ConfigurationError(
            f"{FLAG} {path}: AgentExecutor.execute does not take {', '.join(missing)}, as in OpenRLHF 0.8, but they "
            f"are now its arguments rather than the constructor's: write execute(self, {', '.join(EXECUTE)})."
        )
    with foreign_code(lambda words: ConfigurationError(f"{FLAG} {path}: AgentExecutor() raised {words}")):
        return cls()
