"""What scoring a reasoning-gym answer runs in its worker processes: nothing but reasoning-gym is imported here."""

import ast
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=32)
def _dataset(task: str, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **dict(ast.literal_eval(config)))


def warm_up() -> None:
    """Imports reasoning-gym, so that the first judgement is not charged for it."""
    import reasoning_gym  # noqa: F401


def score_answer(task: str, config: str, answer: str, entry: dict[str, Any]) -> float:
    """The task's own score of `answer`, from 0 to 1; `config` is the repr of its (setting, value) pairs."""
    return float(_dataset(task, config).score_answer(answer, entry))
