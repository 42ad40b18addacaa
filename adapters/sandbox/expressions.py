"""A replacement of `eval` that evaluates only mathematics, for libraries that evaluate expressions of replies.

In the sandbox, code of a reply could change only its own verdict; this keeps it from that, too. Does not own: the
modules that get it (judge_child).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

ARITHMETIC = frozenset({"Integer", "Float", "Rational", "Symbol", "Add", "Mul", "Pow"})
"""Names in sympy's code for numbers, variables and operators."""
BUILT_IN = (abs, pow, round, sum)
announce: list[Callable[[], object]] = []
"""Functions that are called before an expression of more than arithmetic is evaluated."""


def evaluate(source: Any, variables: dict[str, Any] | None = None, names: dict[str, Any] | None = None) -> Any:
    """Evaluates an expression of numbers, texts, collections, operators, and sympy's classes, functions and constants.

    Raises:
        ValueError: the expression has another name or attribute, or defines a function.
    """
    known = {**(variables or {}), **(names or {})}
    code: CodeType = compile(source.lstrip(" \t"), "<answer>", "eval") if isinstance(source, str) else source
    # Attributes are among the names, and functions among the constants; nothing else in an expression can run code.
    for name in code.co_names:
        if name.startswith("_") or not is_mathematics(known.get(name)):
            raise ValueError(f"{name} is no part of an answer")
    if any(isinstance(constant, type(code)) for constant in code.co_consts):
        raise ValueError("an answer makes no functions")
    if not ARITHMETIC.issuperset(code.co_names):
        for tell in announce:
            tell()
    return eval(code, {**known, "__builtins__": {}})


def is_mathematics(value: Any) -> bool:
    """Returns whether a value is an object of sympy's mathematics."""
    from sympy import Basic

    if isinstance(value, type):
        return issubclass(value, Basic)
    return (
        isinstance(value, Basic)
        or any(value is function for function in BUILT_IN)
        or str(getattr(value, "__module__", "")).startswith("sympy.functions.")
    )
