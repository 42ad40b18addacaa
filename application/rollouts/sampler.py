"""Chooses the groups that a rollout trains on: draws prompts, plays them, filters groups, and keeps groups for the next
rollout.

Invariants: the prompts that are played, their ids and seeds depend on the stream and the groups' scores alone, never on
timing; prompts played = groups returned + rejected by reason + kept for the next rollout.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from rollgrad.application.rollouts.groups import RolloutGroup, RolloutService
from rollgrad.application.rollouts.kept import group_of_state, group_state
from rollgrad.application.rollouts.prompt_dealer import Deal, PromptDealer
from rollgrad.domain.algorithms.curriculum import Curriculum
from rollgrad.domain.algorithms.filtering import EMPTY, GroupFilter
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import RewardError
from rollgrad.domain.ports.prompt_source import PromptSource


@frozen(kw_only=True)
class SamplingPlan:
    """Plan of a rollout."""

    groups: int
    """Groups that an update needs."""
    samples: int
    """Samples of each group."""
    in_flight: int
    """Groups that are started at once: at least `groups`; more is over-sampling."""
    budget: float = 10.0
    """Most prompts that are played, as a multiple of `groups`."""
    group_filter: GroupFilter = field(factory=GroupFilter)
    greedy_baseline: bool = False
    judge: Callable[[RolloutGroup], RolloutGroup] = lambda group: group
    """Returns a group with the rewards that depend on several of its samples."""


@define
class _Tally:
    """The groups of one rollout that have been played, and whether they suffice."""

    plan: SamplingPlan
    missing: int
    """Groups that the rollout needs besides those that are ready."""
    started: int
    """Groups whose play has begun, replacements included."""
    played: list[RolloutGroup] = field(factory=list, init=False)
    rejected: Counter[str] = field(factory=Counter, init=False)
    """Number of groups that the filter rejected, by reason."""
    limit: int = field(init=False)
    """Most groups that may be started."""

    def __attrs_post_init__(self) -> None:
        self.limit = max(self.started, int(self.plan.budget * self.plan.groups))

    def wants_another(self, group: RolloutGroup) -> bool:
        """Counts a group that has been played; returns whether another one has to be started in its place.

        Raises:
            RewardError: one has to be, but as many as the plan's budget allows were.
        """
        self.played.append(group)
        reason = group.rejection(self.plan.group_filter)
        if reason is not None:
            self.rejected[reason] += 1
        # A group whose episodes all failed counts against the failure budget; no other takes its place.
        replaceable = reason not in (None, EMPTY)
        still_possible = self.started - self.rejected.total() + self.rejected[EMPTY]
        if not replaceable or still_possible >= self.missing:
            return False
        if self.started >= self.limit:
            kept = len(self.played) - self.rejected.total()
            raise exhausted(self.started, self.missing, kept, self.rejected)
        self.started += 1
        return True


class GroupSampler:
    """Plays and chooses the groups of one rollout after another."""

    def __init__(
        self,
        rollout: RolloutService,
        prompts: PromptSource,
        params: SamplingParams,
        plan: SamplingPlan,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._rollout = rollout
        self._dealer = PromptDealer(prompts, curriculum)
        self._params = params
        self._plan = plan
        self._ready: list[RolloutGroup] = []
        self._deals: dict[int, Deal] = {}  # deals of groups that are ready or being played
        self._again: list[Deal] = []  # groups that were ready, of which a state of an earlier version has no samples

    async def take(self, rollouts_left: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Returns the groups of the next rollout in the order of their prompts, and metrics of all groups played.

        `rollouts_left` includes this one: no more groups are played than these rollouts need, so that none is left over
        at the end. A rollout that is cancelled or fails puts the stream back to its beginning.

        Raises:
            RewardError: the budget of prompts ran out before enough groups were kept, or no episode has a reward.
            RewardError, EngineError: too many episodes failed.
        """
        before = self.state_dict()
        try:
            await self._replay()
            return await self._take(rollouts_left)
        except BaseException:  # a cancellation, too
            self._dealer.load_state_dict(before)
            raise

    async def _replay(self) -> None:
        """Plays the groups that a state names without their samples, under their own ids and seeds."""
        if not self._again:
            return
        budget = self._rollout.failure_budget(len(self._again) * self._plan.samples)
        slots = self._rollout.slots()
        groups = await asyncio.gather(
            *(
                self._rollout.play(
                    deal.prompt,
                    self._params,
                    samples=self._plan.samples,
                    group_id=deal.group_id,
                    slots=slots,
                    greedy_baseline=self._plan.greedy_baseline,
                    judge=self._plan.judge,
                )
                for deal in self._again
            )
        )
        for group in groups:
            budget.charge(group.failures)
        self._ready += [group for group in groups if self._kept(group)]
        self._again = []

    def _kept(self, group: RolloutGroup) -> bool:
        return group.rejection(self._plan.group_filter) is None

    def _deal(self) -> Prompt:
        deal = self._dealer.deal()
        self._deals[deal.group_id] = deal
        return deal.prompt

    async def _take(self, rollouts_left: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        missing = self._plan.groups - len(self._ready)
        wanted = min(self._plan.in_flight, self._plan.groups * rollouts_left - len(self._ready))
        tally = _Tally(self._plan, missing=missing, started=wanted)
        if missing > 0:
            await self._play(wanted, tally)
        played = sorted(tally.played, key=lambda group: group.group_id)
        self._ready += [group for group in played if self._kept(group)]
        if not self._ready:
            raise unrewarded(played)
        taken, self._ready = self._ready[: self._plan.groups], self._ready[self._plan.groups :]
        self._deals = {group.group_id: self._deals[group.group_id] for group in self._ready}
        self._dealer.learn(played)
        kept = {"rollout/kept_for_next": float(len(self._ready))}
        return taken, sampling_metrics(played, tally.rejected) | kept | self._rollout.admission.metrics()

    async def _play(self, groups: int, tally: _Tally) -> None:
        """Plays so many groups, and others in the place of those that the tally wants replaced."""
        stream = self._rollout.stream(
            (self._deal() for _ in itertools.count()),
            self._params,
            samples=self._plan.samples,
            groups=groups,
            refill=tally.wants_another,
            group_ids=itertools.count(self._dealer.next_group),
            greedy_baseline=self._plan.greedy_baseline,
            judge=self._plan.judge,
        )
        async for _ in stream:  # the tally has them
            pass

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, JSON-serialisable; groups kept for the next rollout are positions in the stream."""
        kept = [self._deals[group.group_id] for group in self._ready] + self._again
        return {
            **self._dealer.state_dict(),
            "kept": [{"group": deal.group_id, "position": dict(deal.position)} for deal in kept],
        }

    def kept_groups(self) -> list[dict[str, Any]]:
        """Returns the samples of the groups kept for the next rollout. They cannot be sampled again, because the
        weights have changed."""
        return [group_state(group) for group in self._ready]

    def load_state_dict(self, state: Mapping[str, Any], kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Continues from `state` and the `kept_groups` of the same moment. Groups without samples are played again,
        with the same ids and seeds.

        Raises:
            ValueError: the state is that of an asynchronous run with groups in flight.
        """
        if state.get("pending"):
            raise ValueError(f"{len(state['pending'])} groups were in flight, which needs train.async_enable")
        self._dealer.load_state_dict(state)
        deals = [self._dealer.deal_again(int(p["group"]), p["position"]) for p in state.get("kept", ())]
        self._deals = {deal.group_id: deal for deal in deals}
        self._ready = [group_of_state(group, self._deals[group["group_id"]].prompt) for group in kept]
        played = {group.group_id for group in self._ready}
        self._again = [deal for deal in deals if deal.group_id not in played]


def exhausted(started: int, wanted: int, kept: int, rejected: "Counter[str]") -> RewardError:
    """Returns the error for a rollout in which `started` prompts gave only `kept` of the `wanted` groups."""
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in rejected.most_common())
    return RewardError(
        f"{started} prompts were played for {wanted} groups, but dynamic filtering kept only {kept} ({reasons}): raise "
        "--algo.dynamic_filtering_budget, widen --algo.dynamic_filtering_range, or choose other prompts."
    )


def unrewarded(played: Sequence[RolloutGroup]) -> RewardError:
    """Returns the error for a rollout with too many prompts all of whose episodes failed, or have no reward."""
    empty = [group for group in played if not group.trajectories]
    reasons = [failure.message for group in empty for failure in group.failures]
    return RewardError(
        f"{len(empty)} of {len(played)} prompts that were played have no episode to train on (the last failure: "
        f"{reasons[-1] if reasons else 'none was named'}): mend the reward or the environment, or choose other prompts."
    )


def sampling_metrics(played: Sequence[RolloutGroup], rejected: "Counter[str]") -> dict[str, float]:
    """Returns metrics of all groups played, rejected ones included, with failed episodes by kind."""
    if not played:
        return {}
    scores = [score for group in played for score in group.scores]
    metrics = {"rollout/prompts_played": float(len(played))}
    if scores:
        metrics["reward/score_mean_before_filter"] = sum(scores) / len(scores)
    failures = Counter(failure.kind.value for group in played for failure in group.failures)
    counts = {f"rejected_{reason}": count for reason, count in rejected.items()}
    counts |= {f"failed_{kind}": count for kind, count in failures.items()}
    return metrics | {f"rollout/{name}": float(count) for name, count in counts.items()}
