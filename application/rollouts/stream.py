"""Plays groups continuously, within the staleness bound.

As soon as a group finishes, another is started, if `StalenessGate` has room. For example, with 2 groups an update and
max_staleness 1, 4 groups are in flight at first; `take` returns the first 2 that finish, the other 2 go on during the
update, and after `updated` 2 more are started.

Invariants: those of `domain.control.staleness`; a group's prompt, id and seeds depend on the stream alone, never on
timing; a group that is rejected, fails or becomes too old is counted by reason, and the next prompt takes its place.
With a bound of 0 the groups of a step are those of the synchronous `GroupSampler`.

Does not own: versions of weights (`updated` announces them), nor learning.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rollgrad.application.foreign import error_text
from rollgrad.application.rollouts.failure_budget import FailureBudget
from rollgrad.application.rollouts.groups import RolloutGroup, RolloutService, not_in_silence
from rollgrad.application.rollouts.prompt_dealer import Deal, PromptDealer
from rollgrad.application.rollouts.sampler import SamplingPlan, exhausted, sampling_metrics, unrewarded
from rollgrad.domain.algorithms.curriculum import Curriculum
from rollgrad.domain.algorithms.filtering import EMPTY
from rollgrad.domain.control.staleness import STALE, StalenessBound, StalenessGate
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.trajectory import NO_VERSION
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.clock import Clock
from rollgrad.domain.ports.prompt_source import PromptSource


class GroupStream:
    """Plays groups in the background, from the first `take` until `stop`.

    Args:
        rollout: plays each group.
        prompts: the stream of prompts.
        params: sampling settings.
        plan: samples of a group, groups in flight at once, filter and its budget (counted from batch to batch).
        bound: on the staleness of groups.
        clock: measures `idle_s`.
        curriculum: skips prompts, or None.
    """

    def __init__(
        self,
        rollout: RolloutService,
        prompts: PromptSource,
        params: SamplingParams,
        plan: SamplingPlan,
        bound: StalenessBound,
        clock: Clock,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._rollout = rollout
        self._dealer = PromptDealer(prompts, curriculum)
        self._params = params
        self._plan = plan
        self._clock = clock
        self.gate = StalenessGate(bound)
        """State of every group; read only."""
        self._slots = rollout.slots()
        # Deals of the groups in flight, and of those whose episodes ended by an error.
        self._deals: dict[int, Deal] = {}
        self._again: deque[Deal] = deque()  # groups that an interrupted run had in flight
        self._tasks: dict[int, asyncio.Task[RolloutGroup]] = {}
        self._ready: dict[int, RolloutGroup] = {}
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._played: list[RolloutGroup] = []
        self._rejected: Counter[str] = Counter()
        self._failures = self._failure_budget()
        self._idle_s = 0.0
        self._idle_since: float | None = clock.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds so far in which no group was being played."""
        return self._idle_s + (0.0 if self._idle_since is None else self._clock.monotonic() - self._idle_since)

    async def take(self) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Waits for the groups of the next update; returns them in the order of their prompts, with metrics since the
        last.

        Raises:
            RewardError: the budget of prompts ran out before enough groups were kept, or before enough had a reward.
            RewardError, EngineError: too many episodes failed since the last batch.
        """
        while True:
            if self._error is not None:
                raise self._error
            self._fill()
            chosen = self.gate.take()
            if chosen is not None:
                break
            self._changed.clear()
            await not_in_silence(self._changed.wait, self.gate.running)
        groups = [self._ready.pop(group_id) for group_id in chosen]
        self._dealer.learn(self._played)
        self._played.sort(key=lambda group: group.group_id)
        metrics = sampling_metrics(self._played, self._rejected) | {
            "rollout/kept_for_next": float(len(self._ready)),
            "rollout/groups_in_flight": float(self.gate.running),
        }
        self._played, self._rejected, self._failures = [], Counter(), self._failure_budget()
        lags = lag_metrics(groups, self.gate.version, self.gate.bound.max_staleness)
        return groups, metrics | lags | self._rollout.admission.metrics()

    def updated(self) -> None:
        """Records that the groups of the last `take` are trained on, and that the engine samples from the new
        weights."""
        for group_id in self.gate.updated():
            del self._deals[group_id]
        for group_id in self.gate.stale():
            self._drop(group_id, STALE)

    async def stop(self) -> None:
        """Ends all episodes; their groups stay in the state."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, JSON-serialisable; groups in flight are positions in the stream of prompts."""
        return {
            **self._dealer.state_dict(),
            "pending": [
                {"group": deal.group_id, "position": dict(deal.position)}
                for deal in sorted((*self._deals.values(), *self._again), key=lambda deal: deal.group_id)
            ],
            "version": self.gate.version,
            "trained": self.gate.trained,
            "dropped": dict(self.gate.dropped),
        }

    def kept_groups(self) -> list[dict[str, Any]]:
        """Returns an empty list, because groups in flight are played again."""
        return []

    def load_state_dict(self, state: Mapping[str, Any], kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Continues from `state`; groups in flight are played again, with the same ids and seeds."""
        self._dealer.load_state_dict(state)
        self._again = deque(self._dealer.deal_again(int(p["group"]), p["position"]) for p in state["pending"])
        self.gate = StalenessGate.resumed(
            self.gate.bound, version=int(state["version"]), trained=int(state["trained"]), dropped=state["dropped"]
        )

    def _failure_budget(self) -> FailureBudget:
        return self._rollout.failure_budget(self._plan.groups * self._plan.samples)

    def _fill(self) -> None:
        """Starts as many groups as there is room for."""
        for _ in range(min(self.gate.room, self._plan.in_flight - self.gate.running)):
            deal = self._again.popleft() if self._again else self._dealer.deal()
            self.gate.start(deal.group_id)
            self._deals[deal.group_id] = deal
            played = self._rollout.play(
                deal.prompt,
                self._params,
                samples=self._plan.samples,
                group_id=deal.group_id,
                slots=self._slots,
                greedy_baseline=self._plan.greedy_baseline,
                judge=self._plan.judge,
            )
            task = self._tasks[deal.group_id] = asyncio.create_task(played)
            task.add_done_callback(partial(self._ended, deal.group_id))
            if self._idle_since is not None:
                self._idle_s, self._idle_since = self.idle_s, None

    def _ended(self, group_id: int, task: "asyncio.Task[RolloutGroup]") -> None:
        """Handles the end of a group's task. The next `take` raises its errors."""
        if self._tasks.pop(group_id, None) is None:  # the group was dropped, or the stream is being stopped
            if not task.cancelled():
                task.exception()  # marks the error as seen
            return
        if not self._tasks:
            self._idle_since = self._clock.monotonic()
        try:
            self._receive(task.result())
            if self._error is None:
                self._fill()
        except asyncio.CancelledError:
            self._error = EngineError(f"The episodes of group {group_id} were cancelled from outside.")
        except Exception as error:  # errors of a callback would be lost
            self._error = self._error or error
        except BaseException as error:
            self._error = self._error or EngineError(f"The episodes of group {group_id} ended by {error_text(error)}.")
        ready, wanted = min(len(self._ready), self._plan.groups), self._plan.groups
        self._rollout.progress.progress("sampling", ready * self._plan.samples, wanted * self._plan.samples)
        self._changed.set()

    def _receive(self, group: RolloutGroup) -> None:
        """Makes a played group ready, or rejects it."""
        plan = self._plan
        self._played.append(group)
        self._failures.charge(group.failures)
        reason = group.rejection(plan.group_filter)
        if reason is None:
            self.gate.finish(group.group_id, oldest_version(group))
            self._ready[group.group_id] = group
            for group_id in self.gate.stale():
                self._drop(group_id, STALE)
            return
        self._drop(group.group_id, reason)
        most = max(plan.in_flight, int(plan.budget * plan.groups)) - plan.groups
        if self._rejected[EMPTY] > most:  # replies to which no reward applies are no failures, and would go on for ever
            raise unrewarded(self._played)
        filtered = self._rejected.total() - self._rejected[EMPTY] - self._rejected[STALE]
        if filtered > most:
            kept = len(self._played) - filtered
            raise exhausted(len(self._played), plan.groups, kept, self._rejected)

    def _drop(self, group_id: int, reason: str) -> None:
        self.gate.drop(group_id, reason)
        self._rejected[reason] += 1
        self._ready.pop(group_id, None)
        del self._deals[group_id]
        task = self._tasks.pop(group_id, None)
        if task is not None:
            task.cancel()
            if not self._tasks:
                self._idle_since = self._clock.monotonic()


def oldest_version(group: RolloutGroup) -> int:
    """Returns the policy version that sampled the group's oldest token."""
    return min(int(t.versions_T[t.versions_T != NO_VERSION].min()) for t in group.trajectories)


def lag_metrics(groups: Sequence[RolloutGroup], version: int, max_staleness: int) -> dict[str, float]:
    """Returns the lag of the sampled tokens when `version` trains on them: mean, largest, and the share of tokens by
    lag, up to `max_staleness`."""
    versions = torch.cat([t.versions_T for group in groups for t in group.trajectories])
    lags = version - versions[versions != NO_VERSION]
    shares = {f"staleness/share_lag_{lag}": float((lags == lag).float().mean()) for lag in range(max_staleness + 1)}
    return {"staleness/mean": float(lags.float().mean()), "staleness/max": float(lags.max()), **shares}
