"""Lifetimes of a container's objects: some are closed with the event loop that used them, others at the end.

A provider says so by its kind: `providers.Resource(closed_at_end, MAKE, ...)` closes what `MAKE` made by its `close`,
`LoopResource(MAKE, ...)` by its `aclose`; both only if it was made.
"""

import gc
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.closing import AsyncClosable, Closable
from rollgrad.entrypoints.composition.injection import containers, providers
from rollgrad.entrypoints.names.suggestions import nearest

CLOSED = ("engine", "sink", "tool_box", "server")
"""Adapters that hold connections, threads or files of one run. The run closes them, even those that the caller made.
Others may serve several runs: their maker closes them."""

KEEPS_MEMORY = "rollgrad.adapters.models.torch.allocator"
"""Module that whatever loads a model has imported."""

Made = TypeVar("Made", bound=Closable)
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


class LoopResource(providers.Resource[Any]):
    """A resource that is closed in the event loop that used it."""


def closed_at_end(make: Callable[..., Made], *arguments: Any, **keywords: Any) -> Iterator[Made]:
    """Makes an object, and closes it when the container's resources are shut down."""
    made = make(*arguments, **keywords)
    try:
        yield made
    finally:
        made.close()


def given(adapter: Any) -> providers.Provider[Any]:
    """Returns a provider of an object that the caller made, which is closed as those are that a container makes."""
    if isinstance(adapter, AsyncClosable):
        if isinstance(adapter, Closable):  # shutting it down after its `aclose` calls `close`
            return LoopResource(closed_at_end, lambda: adapter)
        return LoopResource(lambda: adapter)
    if isinstance(adapter, Closable):
        return providers.Resource(closed_at_end, lambda: adapter)
    return providers.Object(adapter)


def give(container: containers.DeclarativeContainer, adapters: Mapping[str, Any], function: str) -> None:
    """Puts the caller's adapters, by the names of providers, in the place of those that the container would make.

    Raises:
        ConfigurationError: the container has no such provider; the message says to which `function` it was given.
    """
    for name, adapter in adapters.items():
        if name not in container.providers:
            similar = nearest(name, sorted(container.providers))
            known = f"did you mean {similar}?" if similar else f"the known ones are {', '.join(container.providers)}."
            raise ConfigurationError(f"{function}() has no argument called {name!r}: {known}")
        container.providers[name].override(given(adapter) if name in CLOSED else providers.Object(adapter))


async def closing(work: Coroutine[Any, Any, Result], container: containers.DeclarativeContainer) -> Result:
    """Does `work`, then closes what belongs to this event loop."""
    try:
        return await work
    finally:
        for resource in list(container.traverse(types=[LoopResource])):
            if resource.initialized:
                try:
                    await resource().aclose()
                finally:
                    resource.shutdown()


def shut_down(container: containers.DeclarativeContainer) -> None:
    """Closes all else that was made: each before what it was made from, and all of them whatever one raises."""
    try:
        container.shutdown_resources()
    except Exception:
        shut_down(container)  # the one that raised counts as closed
        raise


def gives_memory_back(work: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a function return the memory of its models to the system, and to the GPU, when it has ended. Otherwise a
    notebook keeps that memory, each training there adds to it, and an engine in a process of its own has only the
    rest."""

    @wraps(work)
    def then_given_back(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        try:
            return work(*arguments, **keywords)
        finally:
            if (allocator := sys.modules.get(KEEPS_MEMORY)) is not None:  # else there was no model
                gc.collect()  # models are in circles of references
                with suppress(RuntimeError):  # a GPU that an error has left unusable: that error is the one to tell
                    allocator.give_back_freed_memory()

    return then_given_back
