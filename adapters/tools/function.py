"""Tools from Python functions.

Invariant: nothing that the function does (an exception, a hang, a huge number of calls) stops the event loop, unless an
asynchronous one waits without await; the model sees its mistake, but never a traceback. Does not own: the signature
(`function_arguments`).
"""

import asyncio
import inspect
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any, overload

from rollgrad.adapters.chat.image_files import is_picture, png
from rollgrad.adapters.system.daemon_thread import in_daemon_thread
from rollgrad.adapters.system.slots import Slots
from rollgrad.adapters.tools.function_arguments import FunctionArguments, summary
from rollgrad.application.foreign import error_text, foreign_code
from rollgrad.application.rare_warning import RareWarning
from rollgrad.domain.episodes.messages import IMAGE_MARK, ToolResult
from rollgrad.domain.errors import ConfigurationError, EngineError, ForeignError, RollgradError
from rollgrad.domain.ports.environment import Tool

TIMEOUT = 30.0
"""Seconds that a call may take by default."""
THREADS = 16
"""Largest number of simultaneous calls of one synchronous function."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class FunctionTool(Tool):
    """A typed Python function, sync or async, as a tool.

    Arguments are described by type hints and a Google-style docstring, checked and coerced by pydantic; one without a
    type hint takes anything. The function's return value is the result: text and a `ToolResult` unchanged, an image of
    Pillow as an image, anything else as JSON; of a list with images each member on a line. A synchronous function runs
    in a thread, at most `THREADS` at once; one that exceeds its deadline keeps its thread until it returns, since
    threads cannot be stopped.

    Args:
        function: the function to call.
        name: name for the model; default is the function's.
        description: text for the model; default is the docstring up to its first section.
        timeout: seconds a call may take, waiting for a thread included.

    Raises:
        ConfigurationError: a model could not use the name, the timeout or the signature.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self._name = name if name is not None else getattr(function, "__name__", type(function).__name__)
        if not _NAME.fullmatch(self._name):
            raise ConfigurationError(
                f"A tool is called {self._name!r}, but models know names of 1 to 64 letters, digits, _ and -: "
                "pass name=."
            )
        if not timeout > 0:
            raise ConfigurationError(f"The tool {self._name!r} has timeout={timeout:g}, but it must be over 0 seconds.")
        self._function = function
        self._arguments = FunctionArguments(function, self._name)
        self._description = description if description is not None else summary(function)
        self._timeout = timeout
        self._asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )
        self._slots = Slots(THREADS)
        self._failures = RareWarning()

    @property
    def name(self) -> str:
        """The function's name, or the one it was given."""
        return self._name

    @property
    def description(self) -> str:
        """The docstring's beginning, or the description it was given."""
        return self._description

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema from type hints, defaults and the docstring."""
        return self._arguments.schema

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Calls the function. Wrong arguments, an exception in it and a passed deadline are results with `is_error`.

        Raises:
            EngineError: the function raises it, because what it depends on is lost: the model has no part in it.
        """
        try:
            values = self._arguments.read(arguments)
        except ValueError as error:
            return ToolResult(content=str(error), is_error=True)
        try:
            async with asyncio.timeout(self._timeout):
                with foreign_code(ForeignError):
                    if self._asynchronous:
                        value = await self._function(**values)
                    else:
                        value = await in_daemon_thread(lambda: self._function(**values), self._name, self._slots.here())
                        if inspect.isawaitable(value):  # of an asynchronous function in a decorator that is not
                            value = await value
                    if isinstance(value, ToolResult):
                        return value
                    # Writing an image takes a while, in which the event loop must not stand still.
                    return await asyncio.to_thread(_result, value) if _has_pictures(value) else _result(value)
        except TimeoutError:
            self._failures.tell("tool_timed_out", tool=self._name, seconds=self._timeout)
            text = f"The tool {self._name!r} gave no answer within {self._timeout:g} s."
        except EngineError:
            raise
        except RollgradError as error:
            cause = error.__cause__ or error
            self._failures.tell("tool_failed", tool=self._name, error=error_text(cause), exc_info=cause)
            text = f"The tool {self._name!r} failed: {type(cause).__name__}."
        return ToolResult(content=text, is_error=True)

    async def close(self) -> None:
        """Does nothing: threads that still run end with their functions, and never keep the program from ending."""


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, timeout: float = TIMEOUT
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float = TIMEOUT,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Makes a function a `FunctionTool`, as a decorator: `@tool`, or `@tool(name=..., timeout=...)`.

    >>> @tool
    ... def add(a: int, b: int = 1) -> int:
    ...     "Adds two numbers."
    ...     return a + b
    >>> add.name, add.description, add.parameters["required"]
    ('add', 'Adds two numbers.', ['a'])
    """

    def decorate(decorated: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(decorated, name=name, description=description, timeout=timeout)

    return decorate if function is None else decorate(function)


def _result(value: Any) -> ToolResult:
    members = value if isinstance(value, list | tuple) and _has_pictures(value) else [value]
    images = (f"data:image/png;base64,{b64encode(png(each)).decode()}" for each in members if is_picture(each))
    texts = [IMAGE_MARK if is_picture(each) else _text(each) for each in members]
    return ToolResult(content="\n".join(texts), images=tuple(images))


def _has_pictures(value: Any) -> bool:
    """Returns whether a value is an image of Pillow, or a list with one."""
    return any(map(is_picture, value)) if isinstance(value, list | tuple) else is_picture(value)


def _text(value: Any) -> str:
    """Returns text unchanged, anything else as JSON."""
    if isinstance(value, str):
        return value
    from pydantic_core import to_json

    return to_json(value).decode()
