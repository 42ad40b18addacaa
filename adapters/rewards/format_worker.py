"""What the format verifier runs in the sandbox: a pattern may take for ever on a reply that somebody wrote for it."""

import re

PACKAGES: tuple[str, ...] = ()
"""Packages that judgements import."""
EVALUATES: tuple[str, ...] = ()
"""Beginnings of the modules that hand an answer to `eval`, which the sandbox gives them its own for."""


def warm_up() -> None:
    """Does nothing: all is imported."""


def prepare(pattern: str) -> None:
    """Compiles the pattern, which `re` then keeps."""
    re.compile(pattern, re.DOTALL)


def matches(pattern: str, response: str) -> float:
    """1.0 when the whole response matches, else 0.0."""
    return float(re.compile(pattern, re.DOTALL).fullmatch(response) is not None)
