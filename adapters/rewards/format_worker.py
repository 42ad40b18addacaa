"""The format verifier's part in the sandbox: a pattern may take exponential time on some replies."""

import re

PACKAGES: tuple[str, ...] = ()
"""Packages that the verifier imports."""
EVALUATES: tuple[str, ...] = ()
"""Prefixes of the modules that pass an answer to `eval`, which the sandbox replaces by its own there."""


def warm_up() -> None:
    """Does nothing, because nothing has to be imported."""


def prepare(pattern: str) -> None:
    """Compiles the pattern, which `re` caches."""
    re.compile(pattern, re.DOTALL)


def matches(pattern: str, response: str) -> float:
    """Returns 1.0 if the whole response matches, else 0.0."""
    return float(re.compile(pattern, re.DOTALL).fullmatch(response) is not None)
