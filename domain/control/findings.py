"""Findings: reasons why a run cannot learn, found in the metrics of its steps as soon as they show.

A finding begins when its sign (`signs`) was seen in each of the last `WINDOW` rollouts (in all rollouts of a shorter
run), or, of evaluations (`held_out`), in each of the last `EVALUATIONS`. It ends when the sign was missing in as many.
It is reported when it begins; of one that comes and goes only the first, second, fourth, eighth ... time, so that a run
of days has a log that people read. Pure: no clock, and no state but the value itself. Does not own: how findings are
shown.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from attrs import evolve, field, frozen

from rollgrad.domain.control.held_out import BEST, EVALUATION_RULES, EVALUATIONS, held_out
from rollgrad.domain.control.rule import LearningSettings, Metrics, Rule
from rollgrad.domain.control.signs import ALIKE, RULES, WINDOW, age, is_compared

TIMES_TOLD = 3
"""Times of a finding whose steps are told."""


@frozen(kw_only=True)
class Finding:
    """A reason why the run does not learn."""

    name: str
    evidence: str
    """Numbers that were seen."""
    look_at: str
    """Settings to look at."""
    since: int
    """First step in which its sign was seen."""
    until: int
    """Last step in which its sign was seen."""

    def __str__(self) -> str:
        return f"{self.evidence} Look at {self.look_at}."


@frozen(kw_only=True)
class _Streak:
    """Streak of one sign."""

    value: Any = None
    """Value of the sign."""
    first: int = 0
    """Step since which it was seen."""
    seen: int = 0
    """Rollouts in which it was seen."""
    missing: int = 0
    """Rollouts since then in which it was not."""
    finding: Finding | None = None
    """Finding that the streak led to."""


@frozen
class LearningWatch:
    """Watches the steps of one run."""

    run: LearningSettings
    _streaks: Mapping[str, _Streak] = field(factory=dict)
    _past: tuple[Finding, ...] = ()
    _first: Mapping[str, tuple[tuple[float, float], ...]] = field(factory=dict)  # age and value of metrics
    _rewards: tuple[float, ...] = ()  # means of the last rollouts
    _best: Mapping[str, float] = field(factory=dict)  # best values of evaluations
    _evaluated: int = -1
    _updates: int = 0
    _updates_without_gradient: int = 0

    def observe(self, step: int, metrics: Metrics) -> tuple["LearningWatch", tuple[Finding, ...]]:
        """Returns the watch after a step, and the findings that begin with it and are reported."""
        record, first = _Record(self), dict(self._first)
        for name, value in [(name, value) for name, value in metrics.items() if is_compared(name)]:
            old = age(name, metrics)
            alike = [value for before, value in first.get(name, ()) if before >= ALIKE * old][:WINDOW]
            if len(alike) == WINDOW:
                metrics = {**metrics, f"first/{name}": sum(alike) / WINDOW}
            else:
                first[name] = (*first.get(name, ()), (old, value))
        for name, rule in RULES.items():
            window = min(WINDOW, self.run.steps) if rule.no_update else WINDOW
            record.look(name, rule, step, metrics, window)
        grad_norm = metrics.get("policy/grad_norm", metrics.get("train/grad_norm"))
        rewards = (*self._rewards, metrics["reward/mean"])[-WINDOW:] if "reward/mean" in metrics else self._rewards
        watch = evolve(
            record.watch(),
            first=first,
            rewards=rewards,
            updates=self._updates + (grad_norm is not None),
            updates_without_gradient=self._updates_without_gradient + (grad_norm == 0),
        )
        return watch, tuple(record.new)

    def evaluated(self, step: int, metrics: Metrics) -> tuple["LearningWatch", tuple[Finding, ...]]:
        """Returns the watch after the evaluation of a step, and the findings that begin with it and are reported. One
        that was seen before, or had other settings, is not compared."""
        found = held_out(metrics)
        if found is None or step <= self._evaluated or step < self.run.evaluations_since:
            return self, ()
        trained = {"last": self._rewards, "first": [value for _, value in self._first.get("reward/mean", ())]}
        means = {f"{when}/reward/mean": fmean(values) for when, values in trained.items() if values}
        record = _Record(self)
        for name, rule in EVALUATION_RULES.items():
            record.look(name, rule, step, {**metrics, **self._best, **means}, EVALUATIONS)
        best = self._best
        if not best or found[0] > best[f"{BEST}mean"]:
            best = {f"{BEST}mean": found[0], f"{BEST}stderr": found[1], f"{BEST}step": float(step)}
        return evolve(record.watch(), best=best, evaluated=step), tuple(record.new)

    def after(self, logged: Mapping[str, Mapping[int, float | None]], step: int = 0) -> "LearningWatch":
        """Returns the watch after the steps later than `step` whose metrics were logged, each by step, ascending, and
        after their evaluations."""
        rows: dict[int, dict[str, float]] = {}
        evaluations: dict[int, dict[str, float]] = {}
        for name, values in logged.items():
            held = name.startswith("eval/")
            for at in reversed(list(values)):
                if at <= (self._evaluated if held else step):
                    break
                if (value := values[at]) is not None:
                    (evaluations if held else rows).setdefault(at, {})[name] = value
        watch = self
        for at in sorted(rows.keys() | evaluations.keys()):
            if at in rows:
                watch, _ = watch.observe(at, rows[at])
            if at in evaluations:  # it comes after the step
                watch, _ = watch.evaluated(at, evaluations[at])
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


class _Record:
    """Signs that a watch knows, while one step or evaluation is looked at; `new` findings are to be reported."""

    def __init__(self, watch: LearningWatch) -> None:
        self._watch = watch
        self._streaks, self._past = dict(watch._streaks), list(watch._past)
        self.new: list[Finding] = []

    def look(self, name: str, rule: Rule, step: int, metrics: Metrics, window: int) -> None:
        """Looks for a sign, which is a finding once it was seen `window` times in a row."""
        run = self._watch.run
        streak, ended = _advance(self._streaks.get(name, _Streak()), step, rule.sign(metrics, run), window)
        self._past += [ended] if ended is not None else []
        if streak.finding is None and streak.seen >= window:
            evidence, look_at = rule.describe(metrics, run, streak.seen)
            finding = Finding(name=name, evidence=evidence, look_at=look_at, since=streak.first, until=step)
            streak = evolve(streak, finding=finding)
            times = 1 + sum(before.name == name for before in self._past)
            if times.bit_count() == 1:  # a power of two
                self.new.append(finding)
        self._streaks[name] = streak

    def watch(self) -> LearningWatch:
        """Returns the watch that knows it."""
        return evolve(self._watch, streaks=self._streaks, past=tuple(self._past))


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
