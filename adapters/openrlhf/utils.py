"""Helpers that reward and agent files import from `openrlhf.utils`: answers in boxes, equal answers, a logger."""

import logging
import sys

_BOXES = ("\\boxed{", "\\fbox{")
_FORMAT = "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"


def extract_boxed_answer(text: str) -> str | None:
    """What the last `\\boxed{...}` or `\\fbox{...}` of `text` holds, None without one or if it is never closed.

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
    """Whether two answers are the same text or mathematically equal; None is equal to nothing.

    >>> grade_answer("0.5", r"\\frac{1}{2}"), grade_answer("2", "3"), grade_answer(None, "3")
    (True, False, False)
    """
    if given_answer is None or ground_truth is None:
        return False
    given, truth = str(given_answer).strip(), str(ground_truth).strip()
    if given == truth:
        return True
    from rollgrad.adapters.rewards.math_worker import grade
    from rollgrad.domain.errors import RewardError

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it asks for a deadline, which the reward's caller keeps
    try:
        return grade(truth, f"${given}$") == 1.0
    except RewardError:  # the truth is no mathematics, and the texts differ
        return False


def init_logger(name: str) -> logging.Logger:
    """The logger `name`, which writes from INFO on to standard error; made once a name."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%m-%d %H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
