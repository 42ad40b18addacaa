"""Findings: reasons why a run cannot learn, found in the metrics of its steps as soon as they show.

A finding begins when its sign (`signs`) was seen in each of the last `WINDOW` rollouts (in all rollouts of a shorter
run), and ends when it was missing in as many. It is reported when it begins; of one that comes and goes only the first,
second, fourth, eighth ... time, so that a run of days has a log that people read. Pure: no clock, and no state but
the value itself. Does not own: how findings are shown.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from rollgrad.domain.control.rule import LearningSettings, Metrics
from rollgrad.domain.control.signs import ALIKE, RULES, WINDOW, age, is_compared

TIMES_TOLD = 3
"""Times of a finding whose steps are told."""


@frozen(kw_only=True)
class Finding:
    """A reason why the run does not learn: the `evidence` in numbers, the settings to `look_at`, and the first
    (`since`) and last (`until`) step in which its sign was seen."""

    name: str
    evidence: str
    look_at: str
    since: int
    until: int

    def __str__(self) -> str:
        return f"{self.evidence} Look at {self.look_at}."


@frozen(kw_only=True)
class _Streak:
    """Streak of one sign: its `value`, seen since step `first` in `seen` rollouts, then `missing` in so many; and the
    `finding` that it led to."""

    value: Any = None
    first: int = 0
    seen: int = 0
    missing: int = 0
    finding: Finding | None = None


@frozen
class LearningWatch:
    """Watches the steps of one run."""

    run: LearningSettings
    _streaks: Mapping[str, _Streak] = field(factory=dict)
    _past: tuple[Finding, ...] = ()
    _first: Mapping[str, tuple[tuple[float, float], ...]] = field(factory=dict)  # age and value of metrics
    _updates: int = 0
    _updates_without_gradient: int = 0

    def observe(self, step: int, metrics: Metrics) -> tuple["LearningWatch", tuple[Finding, ...]]:
        """Returns the watch after a step, and the findings that begin with it and are reported."""
        streaks, past, new = dict(self._streaks), list(self._past), list[Finding]()
        first = dict(self._first)
        for name, value in [(name, value) for name, value in metrics.items() if is_compared(name)]:
            old = age(name, metrics)
            alike = [value for before, value in first.get(name, ()) if before >= ALIKE * old][:WINDOW]
            if len(alike) == WINDOW:
                metrics = {**metrics, f"first/{name}": sum(alike) / WINDOW}
            else:
                first[name] = (*first.get(name, ()), (old, value))
        for name, rule in RULES.items():
            window = min(WINDOW, self.run.steps) if rule.no_update else WINDOW
            streak, ended = _advance(streaks.get(name, _Streak()), step, rule.sign(metrics, self.run), window)
            past += [ended] if ended is not None else []
            if streak.finding is None and streak.seen >= window:
                evidence, look_at = rule.describe(metrics, self.run, streak.seen)
                finding = Finding(name=name, evidence=evidence, look_at=look_at, since=streak.first, until=step)
                streak = evolve(streak, finding=finding)
                times = 1 + sum(before.name == name for before in past)
                if times.bit_count() == 1:  # a power of two
                    new.append(finding)
            streaks[name] = streak
        grad_norm = metrics.get("policy/grad_norm", metrics.get("train/grad_norm"))
        watch = evolve(
            self,
            streaks=streaks,
            past=tuple(past),
            first=first,
            updates=self._updates + (grad_norm is not None),
            updates_without_gradient=self._updates_without_gradient + (grad_norm == 0),
        )
        return watch, tuple(new)

    def after(self, logged: Mapping[str, Mapping[int, float | None]], step: int = 0) -> "LearningWatch":
        """Returns the watch after the steps later than `step` whose metrics were logged, each by step, ascending; of
        evaluations nothing is watched."""
        rows: dict[int, dict[str, float]] = {}
        for name, values in logged.items():
            for at in reversed(list(values)):
                if at <= step or name.startswith("eval/"):
                    break
                if (value := values[at]) is not None:
                    rows.setdefault(at, {})[name] = value
        watch = self
        for at in sorted(rows):
            watch, _ = watch.observe(at, rows[at])
        return watch

    @property
    def holding(self) -> tuple[Finding, ...]:
        """Findings that have not ended."""
        return tuple(streak.finding for streak in self._streaks.values() if streak.finding is not None)

    def findings(self) -> tuple[Finding, ...]:
        """Returns all findings, those that still hold included, in order of their first step."""
        return tuple(sorted((*self._past, *self.holding), key=lambda finding: finding.since))

    def summary(self) -> tuple[str, ...]:
        """Returns sentences for the end of the run: whether nothing was learned, then `finding_lines`."""
        lines = finding_lines(self.findings())
        if self._updates and self._updates_without_gradient == self._updates:
            count = "the only update" if self._updates == 1 else f"all {self._updates} updates"
            lines.insert(0, f"Nothing was learned: the gradient was 0 in {count}.")
        elif (alike := self._streaks.get("constant_reward")) and alike.finding and alike.seen == self.run.steps:
            lines.insert(0, "Nothing was learned from the reward: every reply of the run had the same.")
        return tuple(lines)


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Returns a sentence for each kind of finding, with its steps; one that comes and goes all through a long run is
    told as it was at last, with its first steps alone."""
    kinds: dict[str, list[Finding]] = {}
    for found in findings:
        kinds.setdefault(found.name, []).append(found)
    lines = []
    for times in kinds.values():
        steps = ", ".join(
            f"{found.since}" if found.since == found.until else f"{found.since} to {found.until}"
            for found in times[:TIMES_TOLD]
        )
        more = f" and {len(times) - TIMES_TOLD} times more" if len(times) > TIMES_TOLD else ""
        lines.append(f"step{'s' if ' ' in steps or more else ''} {steps}{more}: {times[-1]}")
    return lines


def _advance(streak: _Streak, step: int, value: Any, window: int) -> tuple[_Streak, Finding | None]:
    """Returns the streak after one more step, and the finding that ends with it."""
    if value is not None and streak.seen and value == streak.value:
        finding = None if streak.finding is None else evolve(streak.finding, until=step)
        return evolve(streak, seen=streak.seen + 1, missing=0, finding=finding), None
    if streak.finding is not None and value is None and streak.missing + 1 < window:
        return evolve(streak, missing=streak.missing + 1), None
    fresh = _Streak() if value is None else _Streak(value=value, first=step, seen=1)
    return fresh, streak.finding
