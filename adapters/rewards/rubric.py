"""Criteria that a row has for replies to it, each of which a judge is asked about by itself."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from rollgrad.application.foreign import shown
from rollgrad.domain.errors import DataError

SETTING = "reward.judge_rubric_key"
TEXTS = ("criterion", "description", "rubric", "text")
"""Keys of a criterion's text, the first of which that there is counts."""
WEIGHTS = ("weight", "points")
"""Keys of its weight."""


@frozen
class Criterion:
    """A demand on a reply, or with a negative weight a fault in one."""

    text: str
    weight: float = 1.0


def criteria(row: Mapping[str, Any], key: str) -> list[Criterion]:
    """Returns the criteria in the column `key` of a row: a list of texts, or of mappings with a text and a weight.

    Raises:
        DataError: there is no such column, it holds something else, or no criterion has a positive weight.
    """
    found = row.get(key)
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        raise DataError(
            f"{SETTING} is {key!r}, but that column of a row holds {shown(found)}, which is no list of criteria: give "
            "every row a list of texts, or of mappings with criterion and weight."
        )
    result = [_criterion(each, key) for each in found]
    if not any(criterion.weight > 0 for criterion in result):
        raise DataError(
            f"{SETTING} is {key!r}, but none of the {len(result)} criteria in that column of a row has a weight above "
            "0: what earns a reward needs one."
        )
    return result


def weighed(met: Sequence[float], rubric: Sequence[Criterion]) -> float:
    """Returns the sum of weight x judgement over the sum of the positive weights, where judgements are from 0 to 1
    (Gunjal et al. 2025, "Rubrics as Rewards", arXiv:2507.17746, eq. 1). Criteria with weights below 0 take points away,
    as in HealthBench (Arora et al. 2025, arXiv:2505.08775)."""
    earned = math.fsum(criterion.weight * share for criterion, share in zip(rubric, met, strict=True))
    return earned / math.fsum(criterion.weight for criterion in rubric if criterion.weight > 0)


def _criterion(given: Any, key: str) -> Criterion:
    if isinstance(given, str) and given.strip():
        return Criterion(given)
    if isinstance(given, Mapping):
        text = next((given[name] for name in TEXTS if given.get(name) is not None), None)
        weight = next((given[name] for name in WEIGHTS if given.get(name) is not None), 1.0)
        number = isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
        if isinstance(text, str) and text.strip() and number:
            return Criterion(text, float(weight))
    raise DataError(
        f"{SETTING} is {key!r}, but a criterion in that column is {shown(given)}: write a text, or a mapping with the "
        f"text ({', '.join(TEXTS)}) and a number as its weight ({', '.join(WEIGHTS)})."
    )
