"""Parses answers of reward functions and servers.

Invariant: the result is one finite reward for each reply, or one `RewardError` sentence that names the source.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.application.foreign import error_text, foreign_code, shown
from rollgrad.domain.episodes.rewards import Reward
from rollgrad.domain.errors import RewardError


class RewardParser:
    """Parses the answers of `name`: the rewards (list, tensor, or a number for one reply), or a mapping with `rewards`
    and optionally `scores`, `answers`, `feedback` and `extra_logs`. Named rewards are summed by `weights` (default: 1
    each)."""

    def __init__(self, name: str, weights: Mapping[str, float] | None = None) -> None:
        self._name = name
        self._weights = weights

    def parse(self, result: Any, count: int) -> list[Reward]:
        """Returns one reward for each of `count` replies.

        Raises:
            RewardError: the answer has another form or length, or a number that is not finite.
        """
        found: list[Reward] = []
        for reward in self.parse_each(result, count):
            if isinstance(reward, RewardError):
                raise reward
            found.append(reward)
        return found

    def parse_each(self, result: Any, count: int) -> list[Reward | RewardError]:
        """Returns for each of `count` replies its reward, or an error where its number is not finite.

        Raises:
            RewardError: the answer has another form or length.
        """
        with foreign_code(lambda words: RewardError(f"{self._name} returned what cannot be read: {words}.")):
            return self._parse(result, count)

    def _parse(self, result: Any, count: int) -> list[Reward | RewardError]:
        answer = result if isinstance(result, Mapping) else {"rewards": result}
        if "rewards" not in answer:
            raise RewardError(
                f"{self._name} returned a mapping with {sorted(map(str, answer))}: it needs the key 'rewards'; rewards "
                "with names are a mapping below it, {'rewards': {NAME: [one number for each reply]}}."
            )
        parts = self._parts(answer["rewards"], count)
        values = self._sums(parts, count) if parts else self._numbers(answer["rewards"], "rewards", count)
        given_scores = answer.get("scores")
        scores = values if given_scores is None else self._numbers(given_scores, "scores", count)
        errors = self._not_finite("score", scores) | self._not_finite("reward", values)
        answers = self._texts(answer.get("answers"), "answers", count)
        feedback = self._texts(answer.get("feedback"), "feedback", count)
        logs = self._logs(answer.get("extra_logs"), count)
        return [
            errors.get(index)
            or Reward(
                value=value,
                score=score,
                metrics={key: numbers[index] for key, numbers in (logs | parts).items()},
                parts={key: numbers[index] for key, numbers in parts.items()},
                answer=answers[index],
                feedback=feedback[index] or None,
            )
            for index, (value, score) in enumerate(zip(values, scores, strict=True))
        ]

    def _sums(self, parts: Mapping[str, Sequence[float]], count: int) -> list[float]:
        """Returns the weighted sum of the named rewards of each reply."""
        weights = self._weights or dict.fromkeys(parts, 1.0)
        return [math.fsum(weights[name] * numbers[index] for name, numbers in parts.items()) for index in range(count)]

    def _not_finite(self, what: str, numbers: Sequence[float]) -> dict[int, RewardError]:
        """Returns an error for each reply whose number is not finite."""
        return {
            index: RewardError(
                f"{self._name} returned the {what} {number} for reply {index} of {len(numbers)}: each must be a finite "
                "number."
            )
            for index, number in enumerate(numbers)
            if not math.isfinite(number)
        }

    def _logs(self, given: Any, count: int) -> dict[str, list[float]]:
        """Returns the numbers of `extra_logs` for each reply, by their names."""
        if not isinstance(given, Mapping | None):
            raise RewardError(
                f"{self._name} returned extra_logs that are no mapping ({shown(given)}): return a mapping from names "
                "to numbers, one each or one for all replies."
            )
        return {
            str(key): self._numbers(value, f"extra_logs[{key!r}]", count, broadcast=True)
            for key, value in (given or {}).items()
        }

    def _parts(self, rewards: Any, count: int) -> dict[str, list[float]]:
        """Returns the named rewards, empty if they have no names."""
        if not isinstance(rewards, Mapping):
            if self._weights is not None:
                raise RewardError(
                    f"{self._name} returned rewards without names, but reward.weights is {dict(self._weights)}: return "
                    "a mapping of named rewards, or leave --reward.weights out."
                )
            return {}
        parts = {str(name): self._numbers(value, f"rewards[{name!r}]", count) for name, value in rewards.items()}
        if self._weights is not None and parts.keys() != self._weights.keys():
            raise RewardError(
                f"{self._name} returned the rewards {', '.join(parts)}, but reward.weights names "
                f"{', '.join(self._weights)}: give one weight to each with --reward.weights."
            )
        return parts

    def _texts(self, given: Any, what: str, count: int) -> list[str | None]:
        """Returns `given`, one for each reply, as texts; None where there is none."""
        if given is None:
            return [None] * count
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != count:
            raise RewardError(
                f"{self._name} returned {what} that is no list of one text for each of {replies(count)} "
                f"({shown(given)})."
            )
        return [None if each is None else str(each).strip() for each in given]

    def _numbers(self, value: Any, what: str, count: int, *, broadcast: bool = False) -> list[float]:
        """Returns `value`, a sequence, a tensor or array of any shape, or a number, as `count` floats."""
        if hasattr(value, "reshape"):
            value = value.reshape(-1).tolist()
        elif isinstance(value, (int, float)):
            value = [value] * (count if broadcast else 1)
        try:
            items = list(value)
            if any(isinstance(item, Mapping) for item in items):
                raise TypeError("rewards with names are {'rewards': {NAME: [one number for each reply]}}")
            if any(isinstance(item, str) for item in items):
                raise TypeError("text is not a number")
            # JSON has no NaN: a server says null.
            numbers = [math.nan if item is None and not broadcast else float(item) for item in items]
        except Exception as error:  # a user's class, or an integer too large for a float
            raise RewardError(
                f"{self._name} returned {what} that are not numbers ({shown(value)}): {error_text(error)}."
            ) from error
        if broadcast and len(numbers) == 1:
            numbers *= count
        if len(numbers) != count:
            raise RewardError(
                f"{self._name} returned {len(numbers)} {what} for {replies(count)}: it must return one each."
            )
        return numbers


def replies(count: int) -> str:
    """Returns "1 reply" or "N replies"."""
    return "1 reply" if count == 1 else f"{count} replies"
