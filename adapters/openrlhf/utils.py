"""Helpers that reward and agent files import from `openrlhf.utils`: answers in boxes, equal answers, a logger."""

import functools
import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollgrad.adapters.rewards.judge_pool import JudgePool

GRADE_SECONDS = 10.0
"""Longest comparison in seconds; after that the answers count as different."""
WAIT_SECONDS = 600.0
"""Longest wait for other comparisons and for the sandbox to start."""
_BOXES = ("\\boxed{", "\\fbox{")
_FORMAT = "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"


def extract_boxed_answer(text: str) -> str | None:
    """Returns the content of the last `\\boxed{...}` or `\\fbox{...}` of `text`; None without one, or if it is not
    closed.

    >>> extract_boxed_answer(r"so \\boxed{1} becomes \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    start, box = max((text.rfind(box), box) for box in _BOXES)
    if start < 0:
        return None
    begin = start + len(box)
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return None


def grade_answer(given_answer: str | None, ground_truth: str | None) -> bool:
    """Returns whether two answers are the same text or mathematically equal; None is equal to nothing.

    Compared in a sandbox, within 10 seconds.

    >>> grade_answer("0.5", r"\\frac{1}{2}"), grade_answer("2", "3"), grade_answer(None, "3")
    (True, False, False)
    """
    if given_answer is None or ground_truth is None:
        return False
    given, truth = str(given_answer).strip(), str(ground_truth).strip()
    if given == truth:
        return True
    from rollgrad.adapters.rewards import math_worker

    # If the truth is not mathematics the judgement fails: the answers are different, because their texts are.
    verdict = _judges().submit(math_worker.grade, truth, f"${given}$").result(GRADE_SECONDS + WAIT_SECONDS)
    return verdict.value == 1.0


@functools.cache
def _judges() -> "JudgePool":
    """Returns the sandboxes of comparisons, which live as long as this process."""
    from rollgrad.adapters.rewards import math_worker
    from rollgrad.adapters.rewards.judge_pool import JudgePool

    return JudgePool(math_worker, timeout=GRADE_SECONDS)


def init_logger(name: str) -> logging.Logger:
    """Returns the logger `name`, which writes levels from INFO to standard error; it is made only once."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%m-%d %H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
