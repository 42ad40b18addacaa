"""The tools that `agent.tools` names."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rollgrad.adapters.system.python_file import load_python
from rollgrad.adapters.system.slots import Slots
from rollgrad.adapters.tools.basic import FinalTool, ThinkTool
from rollgrad.adapters.tools.mcp import McpTools, check_server, connect
from rollgrad.adapters.tools.python import PythonTool
from rollgrad.application.settings.function_path import is_module_name
from rollgrad.application.settings.sections.agent import PythonIsolation
from rollgrad.domain.errors import ConfigurationError, RollgradError, raise_together
from rollgrad.domain.ports.environment import Tool

MCP = "mcp:"


class ToolBox:
    """Makes the tools at once, except those of MCP servers, which `open` connects to.

    Args:
        names: the value of `agent.tools`; None is no tools.
        isolation: isolation of the python tool.
        flag: flag of `names`, for errors.
        isolation_flag: flag of `isolation`, for errors.

    Raises:
        ConfigurationError: the python tool cannot be isolated, a name is of no known kind, a file has no tools,
            the program of an MCP server is not here, or two tools share a name.
    """

    def __init__(
        self,
        names: str | None,
        isolation: PythonIsolation = PythonIsolation.NAMESPACES,
        *,
        flag: str = "--agent.tools",
        isolation_flag: str = "--agent.python_isolation",
    ) -> None:
        made: Mapping[str, Callable[[], Tool]] = {
            "python": lambda: PythonTool(isolation=isolation, flag=isolation_flag),
            "think": ThinkTool,
            "final": FinalTool,
        }
        self._flag = flag
        self._tools: list[Tool] = []
        self._servers: list[str] = []
        self._connections: list[McpTools] = []
        self._opening = Slots(1)
        problems: list[RollgradError] = []
        for name in (part.strip() for part in (names or "").split(",") if part.strip()):
            try:
                self._add(name, made)
            except RollgradError as error:
                problems.append(error)
        raise_together(problems)
        self._check(self._tools)

    def _add(self, name: str, made: Mapping[str, Callable[[], Tool]]) -> None:
        if name.startswith(MCP):
            check_server(name.removeprefix(MCP))
            self._servers.append(name.removeprefix(MCP))
        elif name.endswith(".py") or ("." in name and is_module_name(name)):
            self._tools += _tools_of(name, self._flag)
        elif name in made:
            self._tools.append(made[name]())
        else:
            known = ", ".join(made)
            raise ConfigurationError(
                f"{self._flag} names {name!r}, which is no tool: the built-in ones are {known}; a file of functions "
                f"ends in .py, a module has a dot (my_lib.tools), and an MCP server is {MCP}COMMAND or {MCP}URL."
            )

    async def open(self) -> Sequence[Tool]:
        """Returns all tools; connects to the MCP servers on the first call.

        Raises:
            ConfigurationError: a server cannot be used, or offers a tool whose name is taken.
        """
        async with self._opening.here():  # episodes that begin together wait for the first of them
            while self._servers:
                connection = await connect(self._servers[0])
                del self._servers[0]
                self._connections.append(connection)
                self._tools += connection.tools
        self._check(self._tools)
        return tuple(self._tools)

    async def aclose(self) -> None:
        """Closes tools and connections; idempotent."""
        for tool in self._tools:
            await tool.close()
        while self._connections:
            await self._connections.pop().close()

    def _check(self, tools: Sequence[Tool]) -> None:
        counts = Counter(tool.name for tool in tools)
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            raise ConfigurationError(f"{self._flag} offers two tools called {twice!r}: rename one of them.")


def _tools_of(path: str, flag: str) -> list[Tool]:
    tools = [value for value in vars(load_python(path, flag=flag)).values() if isinstance(value, Tool)]
    tools = [tool for tool in tools if not isinstance(tool, type)]
    if not tools:
        raise ConfigurationError(
            f"{flag} names {path}, but no function in it is marked as a tool: put @rollgrad.tool above those that the "
            "model may call."
        )
    return tools
