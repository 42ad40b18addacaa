"""Deals the stream of prompts to groups: each prompt gets a group id, and those that the curriculum skips are left out.

Invariants: the same stream, curriculum and records give the same groups, whatever the timing; a group can be dealt
again from its position in the stream.
"""

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from attrs import frozen

from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.algorithms.curriculum import Curriculum
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.prompt_source import PromptSource


@frozen(kw_only=True)
class Deal:
    """A prompt for the group `group_id`, and the stream's `position` directly before it, JSON-serialisable."""

    group_id: int
    prompt: Prompt
    position: Mapping[str, Any]


class PromptDealer:
    """Deals prompts; `next_group` is the id of the next one."""

    def __init__(self, prompts: PromptSource, curriculum: Curriculum | None) -> None:
        self._prompts = prompts
        self._curriculum = curriculum
        self.next_group = 0

    def deal(self) -> Deal:
        """Returns the next prompt to play."""
        while True:
            position = self._prompts.state_dict()
            (prompt,) = self._prompts.take(1)
            if self._curriculum is None or self._curriculum.draw(_key(prompt)):
                self.next_group += 1
                return Deal(group_id=self.next_group - 1, prompt=prompt, position=position)

    def deal_again(self, group_id: int, position: Mapping[str, Any]) -> Deal:
        """Returns what was dealt to `group_id` at `position`; the stream keeps its position."""
        here = self._prompts.state_dict()
        self._prompts.load_state_dict(position)
        (prompt,) = self._prompts.take(1)
        self._prompts.load_state_dict(here)
        return Deal(group_id=group_id, prompt=prompt, position=position)

    def learn(self, played: Iterable[RolloutGroup]) -> None:
        """Records the groups' scores, those of each role apart, in the curriculum, in the order of their ids."""
        if self._curriculum is None:
            return
        for group in sorted(played, key=lambda group: group.group_id):
            if group.scores:
                self._curriculum.record(_key(group.prompt), *(fmean(role.scores) for role in group.of_roles))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the stream, JSON-serialisable."""
        state: dict[str, Any] = {"prompts": self._prompts.state_dict(), "next_group": self.next_group}
        if self._curriculum is not None:
            state["curriculum"] = self._curriculum.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        self._prompts.load_state_dict(state["prompts"])
        self.next_group = int(state["next_group"])
        if self._curriculum is not None:
            self._curriculum.load_state_dict(state["curriculum"])


def _key(prompt: Prompt) -> str:
    """Returns what the curriculum knows a prompt by: questions about several images, and openings of games with several
    seeds, are often the same text."""
    images = [placed.image.digest for placed in prompt.images]
    return repr((prompt.text, prompt.label, prompt.metadata.get("seed"), images))
