"""What the math verifier runs in its worker processes: nothing but math-verify is imported here, for a fast start."""

import logging

from rollgrad.domain.errors import RewardError


def warm_up() -> None:
    """Imports math-verify and runs it once, so that the first judgement is not charged for it."""
    # It warns at every call that the caller keeps the deadline, which the pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    grade("1", "1")


def grade(label: str, response: str) -> float:
    """1.0 when the answer in `response` is mathematically equal to `label`, else 0.0.

    The label may be plain (`72`, `x^2+1`, `\\frac{1}{2}`) or carry its own delimiters (`$...$`, `\\boxed{...}`).

    Raises:
        RewardError: the label holds no mathematics.
    """
    from math_verify import parse, verify

    delimited = "$" in label or "\\boxed" in label or "\\(" in label or "\\[" in label
    gold = parse(label if delimited else f"${label}$", parsing_timeout=None) or parse(label, parsing_timeout=None)
    if not gold:
        raise RewardError(
            f"The label {label!r} holds no mathematics that math-verify can read: "
            "set --data.label_key to a column of final answers, or choose another --reward.verifier."
        )
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
