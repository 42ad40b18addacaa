"""Which groups a rollout trains on: draws prompts, plays them, filters groups, and keeps what the next rollout can use.

Invariants: which prompts are played, under which ids and seeds, follows from the stream and the groups' scores alone,
never from timing; prompts played = groups handed out + rejected by reason + kept for the next rollout.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

from rollgrad.application.rollout import RolloutGroup, RolloutService
from rollgrad.domain.curriculum import Curriculum
from rollgrad.domain.errors import RewardError
from rollgrad.domain.filtering import EMPTY, GroupFilter
from rollgrad.domain.ports.prompt_source import PromptSource
from rollgrad.domain.prompts import Prompt
from rollgrad.domain.sampling import SamplingParams


@frozen(kw_only=True)
class SamplingPlan:
    """`groups` a rollout, of `samples` each; `in_flight` groups (at least `groups`; more is over-sampling) are started
    at once; at most `budget` x `groups` prompts are played for a rollout."""

    groups: int
    samples: int
    in_flight: int
    budget: float = 10.0
    group_filter: GroupFilter = field(factory=GroupFilter)
    greedy_baseline: bool = False


class GroupSampler:
    """The groups of one rollout after another."""

    def __init__(
        self,
        rollout: RolloutService,
        prompts: PromptSource,
        params: SamplingParams,
        plan: SamplingPlan,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._rollout = rollout
        self._prompts = prompts
        self._params = params
        self._plan = plan
        self._curriculum = curriculum
        self._ready: list[RolloutGroup] = []
        self._next_group = 0

    async def take(self, rollouts_left: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        """(the groups of the next rollout in the order of their prompts, what was noticed about all that were played).

        `rollouts_left` counts this one: no more is played than they need together, so nothing is left over at the end.

        Raises:
            RewardError: the budget of prompts ran out before enough groups were kept.
            RewardError, EngineError: too many episodes failed.
        """
        plan = self._plan
        missing = plan.groups - len(self._ready)
        wanted = min(plan.in_flight, plan.groups * rollouts_left - len(self._ready))
        played: list[RolloutGroup] = []
        rejected: Counter[str] = Counter()
        limit = max(wanted, int(plan.budget * plan.groups))
        if missing > 0:
            started = wanted

            def refill(group: RolloutGroup) -> bool:
                nonlocal started
                played.append(group)
                reason = plan.group_filter.rejection(group.scores, group.rewards)
                if reason is not None:
                    rejected[reason] += 1
                # A group whose episodes all failed counts against the failure budget; no other takes its place.
                if reason in (None, EMPTY) or started - rejected.total() + rejected[EMPTY] >= missing:
                    return False
                if started >= limit:
                    raise _exhausted(started, missing, len(played) - rejected.total(), rejected)
                started += 1
                return True

            stream = self._rollout.stream(
                self._draw(),
                self._params,
                samples=plan.samples,
                groups=wanted,
                refill=refill,
                first_group_id=self._next_group,
                greedy_baseline=plan.greedy_baseline,
            )
            async for _ in stream:
                pass
            self._next_group += started
        played.sort(key=lambda group: group.group_id)
        kept = [group for group in played if plan.group_filter.rejection(group.scores, group.rewards) is None]
        self._ready += kept
        taken, self._ready = self._ready[: plan.groups], self._ready[plan.groups :]
        self._learn(played)
        return taken, _metrics(played, rejected) | {"rollout/kept_for_next": float(len(self._ready))}

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, JSON-serialisable; groups kept for the next rollout are not part of it."""
        state: dict[str, Any] = {"prompts": self._prompts.state_dict(), "next_group": self._next_group}
        if self._curriculum is not None:
            state["curriculum"] = self._curriculum.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        self._prompts.load_state_dict(state["prompts"])
        self._next_group = int(state["next_group"])
        if self._curriculum is not None:
            self._curriculum = self._curriculum.load_state_dict(state["curriculum"])

    def _draw(self) -> Iterator[Prompt]:
        while True:
            (prompt,) = self._prompts.take(1)
            play = True
            if self._curriculum is not None:
                play, self._curriculum = self._curriculum.draw(prompt.text)
            if play:
                yield prompt

    def _learn(self, played: list[RolloutGroup]) -> None:
        if self._curriculum is None:
            return
        for group in played:
            if group.scores:
                self._curriculum = self._curriculum.record(group.prompt.text, sum(group.scores) / len(group.scores))


def _exhausted(started: int, wanted: int, kept: int, rejected: "Counter[str]") -> RewardError:
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in rejected.most_common())
    return RewardError(
        f"{started} prompts were played for {wanted} groups, but dynamic filtering kept only {kept} ({reasons}): raise "
        "--algo.dynamic_filtering_budget, widen --algo.dynamic_filtering_range, or choose other prompts."
    )


def _metrics(played: list[RolloutGroup], rejected: "Counter[str]") -> dict[str, float]:
    if not played:
        return {}
    scores = [score for group in played for score in group.scores]
    metrics = {"rollout/prompts_played": float(len(played))}
    if scores:
        metrics["reward/score_mean_before_filter"] = sum(scores) / len(scores)
    return metrics | {f"rollout/rejected_{reason}": float(count) for reason, count in rejected.items()}
