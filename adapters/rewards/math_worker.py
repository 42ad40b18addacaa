"""The math verifier's part in the sandbox. It imports nothing of rollgrad, which the sandbox cannot read.

Invariants: where the label is a number, an answer must be a number, too. A computation of it (`18 + 15` for 33) is
none: it would reward a reply for repeating the question. Of several boxes the last one is the answer, with those that
are listed before it.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PACKAGES: tuple[str, ...] = ("math_verify",)
"""Packages that the verifier imports."""
EVALUATES = ("sympy.parsing.sympy_parser",)
"""Prefixes of the modules that pass an answer to `eval`, which the sandbox replaces by its own there."""

BOX = "\\boxed{"
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;]|\\[()\[\],; ]|\\q?quad|and|or|\\text\{\s*(?:and|or)\s*\})*", re.ASCII)
"""Text between the boxes of a list."""
_REPEATING = re.compile(r"([0-9]{1,18})\.([0-9]{0,18})\\overline\{([0-9]{1,18})\}")
_MIXED = re.compile(r"(?<![0-9/.,])([0-9]{1,18}) ([0-9]{1,18})/([0-9]{1,18})(?![0-9/])")
_MIXED_FRAC = re.compile(
    r"(?<![0-9/.,^_])([0-9]{1,18})\s*\\[dt]?frac\s*(?:\{([0-9]{1,18})\}\s*\{([0-9]{1,18})\}|([0-9])([0-9]))"
)
_PERCENT = re.compile(r"\\frac\{([0-9]+)\}\{([0-9]+)\}\s*\\?%")
_NUMBER = r"-?[0-9]{1,18}(?:[.,/][0-9]{1,18}){0,9}"
_DENIED = re.compile(
    rf"(?:\b(?:not|rather than|instead of)|n['\N{{RIGHT SINGLE QUOTATION MARK}}]t)\s+[$(*]{{0,4}}{_NUMBER}[$)*]{{0,4}}",
    re.I,
)
"""A number that the reply says is not the answer."""
_OPERATOR = r"\s*(?:[-+*/\N{MULTIPLICATION SIGN}\N{DIVISION SIGN}]|\\(?:times|cdot|div)\b)\s*"
_PLAIN = r"-?[0-9]{1,18}(?:\.[0-9]{1,18})?"
_COMPUTED = re.compile(
    rf"(?<![\w.,/+*=^)}}-])(?<![-+*/=] )({_NUMBER})\s*=\s*{_PLAIN}(?:{_OPERATOR}{_PLAIN})+(?![0-9.]*\s*[=\w^\\])"
)
"""A number that is said to equal a computation: `33 = 18 + 15`."""
_BASE = re.compile(r"[0-9]_\{?([0-9]{1,2})\}?")
_RELATION = re.compile(r"([a-z])\s*(<|>|\\leq?\b|\\geq?\b|\\leqslant\b|\\geqslant\b)\s*([^<>=,;$]{1,99})")
_EITHER = re.compile(r"\s{0,9}(?:\\cup|\\text\{\s*or\s*\}|\bor\b)\s{0,9}")
_DECORATION = re.compile(
    r"\\(?:text|textbf|textit|mathbf|mathrm|boldsymbol|bm|emph)\s*\{([^{}]*)\}|[*$`]+|\\[()\[\] ,;]"
)
_CLAIM = re.compile(r"\b(?:answer|option|choice)(?:\s+(?:is|would be|should be)|\s*[:=])\s*:?\s*", re.I)
_CHOICE = re.compile(r"\(?([A-Z])(?:(?:[).:]|\s+(?:because|since)\b).*)?", re.S)
_EXPONENT = re.compile(r"(?<![\w.])([0-9]{1,18}(?:\.[0-9]{1,18})?[eE][-+]?[0-9]{1,2})(?![\w.]*\w)")
_REWRITTEN = (
    ("\N{MINUS SIGN}", "-"),
    (r"\\f(?:rame)?box\{", r"\\boxed{"),
    (r"(?<=[A-Za-z]):(?=[-$0-9])", ": "),
    (r"(?<=[0-9])\.(?=\s*\})", ""),
    (r"(?<=[0-9])(?:,?\\!,?|\\[,; ]|\{,\}|~)+(?=[0-9]{3}(?![0-9]))", ""),  # between thousands
    ("~", " "),
    (r"\N{DEGREE SIGN}|\\degree\b|\\textdegree\b", r"^\\circ"),
    (r"\\varnothing\b", r"\\emptyset"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi"),
    (r"\\sqrt\s*([0-9]{2,18})", r"\\sqrt{\1}"),
    (r"(?:\N{SQUARE ROOT}|\\sqrt)\(([^()]{1,99})\)", r"\\sqrt{\1}"),
    (r"\N{SQUARE ROOT}([0-9]{1,18}|[a-z])", r"\\sqrt{\1}"),
    (r"\\\$(?=\s?[0-9.])", ""),
    (r"\\text\{[^{}]*:\s*\}", ""),  # \text{Answer: }
    (r"(/[0-9]{1,18})\.(?=\s|$)", r"\1\n"),  # the end of a sentence, and none of a decimal
    (r"(?<=[0-9])_(?:10(?![0-9])|\{10\}|\{?\\text\{\s*(?:base\s*)?(?:10|ten)\s*\}\}?)", ""),
    (r"\\\{\s*[a-z]\s*(?::|\||\\mid\b|\\colon\b)([^{}]*?)\\\}", r"\1"),  # the set of all x with
    (r"\\(?:text|textbf|mathbf|mathrm|boldsymbol|bm)\{\s*(-?[0-9][0-9.,]*)\s*\}", r"\1"),  # math-verify: a variable
)
"""Patterns of what math-verify misreads, with what it reads."""
_NUMBERS = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_MANY = 1000
"""More numbers than an answer that is one number is told by."""
_SIDE_BY_SIDE = re.compile(r"[0-9]\s+[0-9]")


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
    from math_verify import verify

    gold = _read(label)
    if not gold:
        raise ValueError(f"the label {label!r} holds no mathematics")
    text = _last_boxes(_rewritten(answered(response)))
    if _same_words(label, text):
        return 1.0
    bases = [set(_BASE.findall(each)) for each in (_rewritten(label), text)]
    if all(bases) and bases[0] != bases[1]:
        return 0.0  # math-verify reads the digits alone
    found = _parsed(_COMPUTED.sub(r"\1", text if BOX in text else _DENIED.sub("", text)))
    if _is_number(gold[0]):
        found = list(filter(_may_be, found))
        whole = getattr(gold[0], "is_Integer", False)  # a whole number needs no second number, as a fraction does
        if _numbers_told(found) > (max(1, _numbers_told(gold)) if whole else _MANY - 1):
            return 0.0
    # A set of numbers may be told as an inequality.
    return float(verify(gold, found, timeout_seconds=None, allow_set_relation_comp=True))


def readable(label: str) -> float:
    """Returns 1.0 if math-verify finds mathematics in `label`, else 0.0."""
    return float(bool(_read(label)))


def answered(response: str) -> str:
    """Returns what stands in the last <answer>...</answer> of a reply, or else all of it.

    >>> answered("<answer>8</answer>, no: <answer> 7</answer>.")
    ' 7'
    """
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    return response if start < 0 else response[start + len("<answer>") : end]


def _read(label: str) -> list[Any]:
    text = _rewritten(label)
    plain = text.replace("\\$", "")  # currency
    delimited = "$" in plain or "\\boxed" in text or "\\(" in text or "\\[" in text
    bare = text.replace("$", "").strip()
    union = _either(f"{BOX}{bare}}}")[len(BOX) : -1]
    # Both, because a reply without a box has its inequalities as they are.
    found = _parsed(f"${union}$") if union != bare else []
    return [*found, *(_parsed(text if delimited else f"${text}$") or _parsed(text))]


def _parsed(text: str) -> list[Any]:
    """Returns what math-verify reads of the answer in a text: an expression, if it can, and the answer's own text."""
    from math_verify import parse

    found: list[Any] = []
    if _PERCENT.search(text):  # math-verify reads `50\\%`, but no percentage that is a fraction
        found = parse(_PERCENT.sub(r"\\frac{\1}{\g<2>00}", text), parsing_timeout=None)
        text = _PERCENT.sub(r"\\frac{\1}{\2}", text)
    return [*found, *parse(text, parsing_timeout=None)]


def _same_words(label: str, text: str) -> bool:
    """Returns whether the label is a word, or the letter of a choice, and the reply answers it: in its last box, after
    "answer is", or as all that it says."""
    wanted = _bare(label)
    if not re.fullmatch(r"\(?[A-Z]\)?|[A-Za-z]{2,}(?: [A-Za-z]+)*", wanted):
        return False
    start = text.find(BOX)
    end = box_end(text, start) if start >= 0 else None
    if end is not None:
        told = _bare(text[start + len(BOX) : end - 1])
    else:
        plain = _bare(text)
        claims = list(_CLAIM.finditer(plain))
        told = plain[claims[-1].end() :] if claims else plain
        if not claims and len(wanted.strip("()")) == 1:
            return told.strip("().:") == wanted.strip("()")  # a reply that goes through all choices names each
    if len(wanted.strip("()")) == 1:
        choice = _CHOICE.fullmatch(told)
        return choice is not None and choice[1] == wanted.strip("()")
    return told.rstrip(".!").casefold() == wanted.casefold()


def _bare(text: str) -> str:
    """Returns a text without what sets it in bold or as text, or as mathematics.

    >>> _bare(r"\\textbf{(A)}\\ 33"), _bare("**B**.")
    ('(A) 33', 'B.')
    """
    return " ".join(_DECORATION.sub(lambda found: found[1] or (" " if found[0][0] == "\\" else ""), text).split())


def _numbers_told(found: list[Any]) -> int:
    """Returns how many numbers an answer is told by, of which math-verify may return a value: a quotient's, a
    function's; many if they are side by side, because it adds these."""
    text = found[-1].rpartition("=")[2] if found and isinstance(found[-1], str) else ""
    if _SIDE_BY_SIDE.search(text):
        return _MANY
    return 1 if "10^" in text else len(_NUMBERS.findall(text))


def _may_be(value: Any) -> bool:
    """Returns whether a number may be told so: as a text, a number, or an inequality."""
    from sympy.core.relational import Equality, Relational
    from sympy.logic.boolalg import And

    parts = value.args if isinstance(value, And) else [value]
    inequality = all(isinstance(part, Relational) and not isinstance(part, Equality) for part in parts)
    return isinstance(value, str) or inequality or _is_number(value)


def _is_number(value: Any) -> bool:
    """Returns whether an expression is a number as it is written (a fraction, a percentage, 1.5 x 10^3), or several,
    with nothing left to compute."""
    from sympy import Mul, Pow, S, Set, Tuple, UnevaluatedExpr
    from sympy.core.relational import Equality
    from sympy.logic.boolalg import And, BooleanAtom
    from sympy.matrices import MatrixBase

    if isinstance(value, Equality):
        return _is_number(value.rhs)
    if isinstance(value, And):  # a chain of equations, of which the last one counts
        chain = value._unsorted_args
        return bool(chain) and isinstance(chain[-1], Equality) and _is_number(chain[-1])
    if isinstance(value, MatrixBase):
        return all(map(_is_number, value))
    if isinstance(value, Set | Tuple):
        return value is S.Reals or (bool(value.args) and all(map(_is_number, value.args)))
    if getattr(value, "is_Number", False) or isinstance(value, BooleanAtom):  # whether an interval is open
        return True

    def is_power(factor: Any, base: Any, exponent: Any) -> bool:
        powers = isinstance(factor, Pow) and all(part.is_Integer for part in factor.args)
        return powers and base in (None, factor.base) and exponent in (None, factor.exp)

    factors = [factor for factor in Mul.make_args(value) if factor != -1 and not is_power(factor, 10, None)]
    shares = [factor for factor in factors if isinstance(factor, UnevaluatedExpr) or is_power(factor, None, -1)]
    numbers = [factor for factor in factors if getattr(factor, "is_Number", False)]
    return len(shares) <= 1 and len(numbers) <= 1 and len(shares) + len(numbers) == len(factors)


def _rewritten(text: str) -> str:
    """Returns a text in which math-verify reads what it would misread.

    >>> _rewritten("1\\\\,234, 2.5e3, 1 1/2")
    '1234, 2500, \\\\frac{3}{2}'
    """
    for pattern, replacement in _REWRITTEN:
        text = re.sub(pattern, replacement, text)
    text = _either(text)
    text = _REPEATING.sub(lambda found: _fraction_of_repeating(*found.groups()), text)
    text = _MIXED_FRAC.sub(lambda found: _fraction_of_mixed(found[0], *map(int, filter(None, found.groups()))), text)
    text = _MIXED.sub(lambda found: _fraction_of_mixed(found[0], *map(int, found.groups())), text)
    return _EXPONENT.sub(lambda found: format(Decimal(found[0]), "f"), text)


def _either(text: str) -> str:
    """Returns a text whose last box, if it holds inequalities with "or" between, holds the union of their intervals.

    >>> _either("\\\\boxed{x < 1 \\\\text{ or } x \\\\ge 3}")
    '\\\\boxed{(-\\\\infty,1)\\\\cup[3,\\\\infty)}'
    """
    start = text.rfind(BOX)
    end = box_end(text, start) if start >= 0 else None
    if end is None:
        return text
    inside = text[start + len(BOX) : end - 1]
    parts = [_RELATION.fullmatch(part.strip()) for part in _EITHER.split(inside)]
    if len(parts) < 2 or not all(parts) or len({part[1] for part in parts if part}) > 1:
        return text
    union = "\\cup".join(_interval(part[2], part[3].strip()) for part in parts if part)
    return text[: start + len(BOX)] + union + text[end - 1 :]


def _interval(relation: str, bound: str) -> str:
    closed = "e" in relation
    if relation[0] == "<" or relation.startswith("\\l"):
        return f"(-\\infty,{bound}{']' if closed else ')'}"
    return f"{'[' if closed else '('}{bound},\\infty)"


def _fraction_of_repeating(whole: str, digits: str, repeated: str) -> str:
    below = 10 ** len(digits) * (10 ** len(repeated) - 1)
    return f"\\frac{{{int(whole + digits + repeated) - int(whole + digits)}}}{{{below}}}"


def _fraction_of_mixed(text: str, whole: int, above: int, below: int) -> str:
    return f"\\frac{{{whole * below + above}}}{{{below}}}" if above < below else text


def _last_boxes(text: str) -> str:
    """Returns a text from its last box on, with those that are listed before it; math-verify would take all boxes for
    one list."""
    boxes: list[tuple[int, int]] = []
    start = text.find(BOX)
    while start >= 0:
        end = box_end(text, start)
        if end is None:
            break
        boxes.append((start, end))
        start = text.find(BOX, end)
    first = len(boxes) - 1
    while first > 0 and _BETWEEN_BOXES.fullmatch(text, boxes[first - 1][1], boxes[first][0]):
        first -= 1
    if first <= 0:
        return text
    return text[boxes[first][0] :]


def box_end(text: str, start: int) -> int | None:
    """Returns where the box that begins at `start` ends, after its brace; None if it does not."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "}" and depth == 0:
            return place + 1
    return None
