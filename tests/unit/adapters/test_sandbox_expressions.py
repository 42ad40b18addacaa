"""The `eval` that libraries get which evaluate replies: mathematics, and nothing else."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import sympy

from rollgrad.adapters.data.reasoning_gym import worker
from rollgrad.adapters.sandbox import expressions

NAMES: dict[str, Any] = {}
exec("from sympy import *", NAMES)
NAMES.update({name: __builtins__[name] for name in ("abs", "sum", "eval", "exec", "open", "getattr", "__import__")})  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("  (0x1f ^ 2) << 1", 58),
        ("[['Q', '_'], ['_', 'Q']]", [["Q", "_"], ["_", "Q"]]),
        ("{'a': (1, 2.5), 'b': {3}}", {"a": (1, 2.5), "b": {3}}),
        ("3 if 1 < 2 else 4", 3),
        ("Integer(1) / Integer(3)", sympy.Rational(1, 3)),
        ("sqrt(Symbol('x')) + pi", sympy.sqrt(sympy.Symbol("x")) + sympy.pi),
        ("Function('f')(Symbol('x'))", sympy.Function("f")(sympy.Symbol("x"))),
        ("Add(Integer(1), Integer(1), evaluate=False)", sympy.Add(1, 1, evaluate=False)),
        ("abs(-2) + sum([1, 2])", 5),
        ("factorial(4) + Rational(1, 2)", sympy.Rational(49, 2)),
    ],
)
def test_mathematics_is_evaluated(text: str, value: Any) -> None:
    assert expressions.evaluate(text, NAMES) == value


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os')", "eval('1')", "exec('1')", "open('x')", "getattr(1, 'real')", "().__class__", "(1).real"),
        *("[].append", "'{0.__class__}'.format(1)", "lambda: 1", "(lambda: 1)()", "f'{open}'"),
        *(
            "lambdify((), '1')()",
            "sympify('1')",
            "S('1')",
            "parse_expr('1')",
            "Symbol('x').func",
            "print",
            "__builtins__",
        ),
        *(
            "pi.__class__",
            "Integer.__mro__",
            "preview(1)",
            "unknown",
            "(y := open)",
            "yield_",
            "Symbol('x').subs(1, 2)",
        ),
    ],
)
def test_anything_else_is_refused_before_it_runs(text: str) -> None:
    with pytest.raises(ValueError, match="answer"):
        expressions.evaluate(text, NAMES)
    with pytest.raises(ValueError, match="answer"):
        expressions.evaluate(compile(text, "?", "eval"), NAMES)


def test_more_than_arithmetic_is_announced_before_it_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(expressions, "announce", [lambda: told.append("told")])
    for text in ("1 + 2", "Integer(1) + Symbol('x')"):
        expressions.evaluate(text, NAMES)
    assert told == []
    with pytest.raises(TypeError):
        expressions.evaluate("sin(1, 2, 3)", NAMES)
    assert told == ["told"]


def test_every_module_of_reasoning_gym_that_evaluates_is_among_those_that_get_it() -> None:
    spec = importlib.util.find_spec("reasoning_gym")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    evaluating = {
        f"reasoning_gym.{path.relative_to(package).with_suffix('').as_posix().replace('/', '.')}"
        for path in package.rglob("*.py")
        if "eval" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "eval"
    }
    assert len(evaluating) > 5
    assert all(name.startswith(worker.EVALUATES) for name in evaluating)
