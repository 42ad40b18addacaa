"""Scoring of reasoning-gym answers, which runs in the sandbox and imports nothing of rollgrad.

Some scorers pass the answer to `eval`, or to sympy's parser, which calls `eval`.
"""

import ast
import re
from functools import lru_cache
from typing import Any

PACKAGES = ("reasoning_gym",)
"""Packages that scorers import."""
EVALUATES = ("reasoning_gym.", "sympy.parsing.sympy_parser")
"""Prefixes of the modules that pass an answer to `eval`, which the sandbox replaces by its own there."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_answer(response: str) -> str:
    """Returns the text in the last <answer> tags, or else the whole reply; stripped."""
    tagged = _ANSWER.findall(response)
    return str(tagged[-1] if tagged else response).strip()


@lru_cache(maxsize=32)
def prepare(task: str, config: str) -> Any:
    """Returns the task's dataset, which has its scorer; `config` is the repr of its (setting, value) pairs."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **dict(ast.literal_eval(config)))


def warm_up() -> None:
    """Imports reasoning-gym, so that the import does not count against the time limit of a judgement."""
    import reasoning_gym  # noqa: F401


def score_answer(task: str, config: str, response: str, entry: dict[str, Any]) -> float:
    """Returns the task's own score of the answer in `response`, from 0 to 1."""
    return float(prepare(task, config).score_answer(extract_answer(response), entry))
