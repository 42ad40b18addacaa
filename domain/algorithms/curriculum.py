"""Curriculum by pass rate: most visits to prompts that the policy always or never solves are skipped."""

import hashlib
from collections.abc import Mapping
from typing import Any

from attrs import define, field

KEY_BYTES = 12
"""Bytes of the hash that stands for a prompt's text: of a million prompts no two are likely to share one."""


@define(kw_only=True)
class Curriculum:
    """Pass rates of the prompts seen so far, and the rule by which prompts are skipped.

    A prompt whose latest mean score lies outside `limits` is played only every `revisit`-th time it comes up. Prompts
    not yet seen are never skipped. It is changed in place, and keeps no texts: a run may see very many prompts.
    """

    limits: tuple[float, float]
    revisit: int = 8
    _seen: dict[str, tuple[float, int]] = field(factory=dict)
    """Latest mean score of each prompt, by its key, and times that it was skipped in a row."""

    def record(self, prompt: str, *means: float) -> None:
        """Records the mean score of the prompt's latest group; of several roles' the first within the limits, if there
        is one: the prompt is played while one of them can learn."""
        within = (mean for mean in means if self.limits[0] <= mean <= self.limits[1])
        self._seen[_key(prompt)] = next(within, means[0]), 0

    def draw(self, prompt: str) -> bool:
        """Returns whether to play the prompt, which has come up."""
        key = _key(prompt)
        found = self._seen.get(key)
        if found is None or self.limits[0] <= found[0] <= self.limits[1]:
            return True
        rate, skipped = found
        play = skipped + 1 >= self.revisit
        self._seen[key] = rate, 0 if play else skipped + 1
        return play

    def state_dict(self) -> dict[str, Any]:
        """Returns the scores and skips of the prompts seen so far, JSON-serialisable."""
        return {"seen": {key: list(found) for key, found in self._seen.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the scores and skips of `state`."""
        seen = state.get("seen", {})  # states of earlier versions knew prompts by their texts alone
        self._seen = {key: (float(rate), int(skipped)) for key, (rate, skipped) in seen.items()}


def _key(prompt: str) -> str:
    return hashlib.blake2b(prompt.encode(errors="backslashreplace"), digest_size=KEY_BYTES).hexdigest()
