"""A judge that runs the reply: what no judge should do, for tests of what it can reach then."""

from typing import Any

PACKAGES: tuple[str, ...] = ()
EVALUATES: tuple[str, ...] = ()
memory: list[Any] = []


def warm_up() -> None:
    import socket  # noqa: F401


def attempt(code: str) -> float:
    """1.0 when the code runs to its end, else what it raises."""
    exec(code, {"memory": memory})
    return 1.0


def value(number: float) -> float:
    return number
