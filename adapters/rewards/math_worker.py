"""The math verifier's part in the sandbox. It imports nothing of rollgrad, which the sandbox cannot read."""

import logging

PACKAGES: tuple[str, ...] = ("math_verify",)
"""Packages that the verifier imports."""
EVALUATES = ("sympy.parsing.sympy_parser",)
"""Prefixes of the modules that pass an answer to `eval`, which the sandbox replaces by its own there."""


def warm_up() -> None:
    """Imports math-verify and runs it once, so that imports do not count against the time limit of a judgement."""
    # It warns at every call that the caller keeps the deadline, which the pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for label, response in (("\\frac{1}{2}", "so $\\frac{2}{4}$"), ("x^2+x", "$x(x+1)$"), ("72", "It is 72.5")):
        grade(label, response)


def grade(label: str, response: str) -> float:
    """Returns 1.0 if the answer in `response` is mathematically equal to `label`, else 0.0.

    The label may be plain (`72`, `x^2+1`, `\\frac{1}{2}`) or carry its own delimiters (`$...$`, `\\boxed{...}`).

    Raises:
        ValueError: the label holds no mathematics.
    """
    from math_verify import parse, verify

    gold = _read(label)
    if not gold:
        raise ValueError(f"the label {label!r} holds no mathematics")
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))


def readable(label: str) -> float:
    """Returns 1.0 if math-verify finds mathematics in `label`, else 0.0."""
    return float(bool(_read(label)))


def _read(label: str) -> list[object]:
    from math_verify import parse

    delimited = "$" in label or "\\boxed" in label or "\\(" in label or "\\[" in label
    gold: list[object] = parse(label if delimited else f"${label}$", parsing_timeout=None)
    return gold or parse(label, parsing_timeout=None)
