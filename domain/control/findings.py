"""Findings: reasons why a run cannot learn, found in the metrics of its steps as soon as they show.

A sign is a condition on one step's metrics. A finding begins when its sign was seen in each of the last `WINDOW`
rollouts (in all rollouts of a shorter run), and ends when it was missing in as many; it is reported once each time it
begins. Pure: no clock, and no state but the value itself. Does not own: how findings are shown.
"""

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, field, frozen

WINDOW = 3
"""Rollouts in a row that a sign needs: chance, or a batch of easy prompts, gives one rollout without any spread."""

TRUNCATED_SHARE = 0.99
"""Share of truncated replies from which on the model seems not to end its replies by itself."""

COLLAPSED_ENTROPY = 0.01
"""Nats per token below which samples of a prompt hardly differ; replies of trained models have 0.1 to 2."""

Metrics = Mapping[str, float]


@frozen(kw_only=True)
class LearningSettings:
    """Settings of a run that findings depend on.

    `steps`: rollouts of the whole run. `judged_by_outcome`: whether advantages come from the rewards of whole replies,
    rather than from a teacher or from single turns. `compared_in_groups`: whether a reply's advantage compares it with
    others to the same prompt. `pass_threshold`: score from which a reply passes. `max_new_tokens`: length at which a
    reply is truncated.
    """

    steps: int
    judged_by_outcome: bool = True
    compared_in_groups: bool = True
    pass_threshold: float = 1.0
    max_new_tokens: int = 1024


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
class _Rule:
    """Rule of one finding. `sign` returns a value if the step shows the sign, else None; a streak consists of equal
    values. `describe` returns evidence and settings to look at, from the latest metrics and the number of rollouts in
    the streak. `no_update`: the sign means that the weights do not change, which is reported of runs shorter than the
    window, too."""

    sign: Callable[[Metrics, LearningSettings], Any]
    describe: Callable[[Metrics, LearningSettings, int], tuple[str, str]]
    no_update: bool = False


def _constant_reward(metrics: Metrics, run: LearningSettings) -> float | None:
    lowest, highest = metrics.get("reward/min"), metrics.get("reward/max")
    return lowest if run.judged_by_outcome and lowest is not None and lowest == highest else None


def _describe_constant_reward(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    value, replies = metrics["reward/min"], f"{metrics['rollout/samples']:.0f} replies"
    evidence = f"The reward was {value:g} for every reply of {_rollouts(rollouts)} ({replies} each)"
    if value >= run.pass_threshold:
        return f"{evidence}: all prompts are solved, there is nothing left to learn.", "--data.prompt_dataset"
    settings = "samples.jsonl, the reward (--reward.verifier, --reward.function_path, ...) and --data.label_key"
    return f"{evidence}: it tells no reply from another.", settings


def _no_spread(metrics: Metrics, run: LearningSettings) -> bool | None:
    if not (run.judged_by_outcome and run.compared_in_groups) or _constant_reward(metrics, run) is not None:
        return None
    return (metrics.get("rollout/zero_spread_share") == 1 and metrics.get("advantage/abs_mean") == 0) or None


def _describe_no_spread(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"In every group of {_rollouts(rollouts)} all replies to a prompt had the same reward (mean "
        f"{metrics['reward/mean']:.3g}), so that all advantages are 0."
    )
    return evidence, "--rollout.n_samples_per_prompt, --rollout.temperature and the reward"


def _truncated(metrics: Metrics, run: LearningSettings) -> bool | None:
    return metrics.get("rollout/truncated_share", 0.0) >= TRUNCATED_SHARE or None


def _describe_truncated(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"{metrics['rollout/truncated_share']:.0%} of the replies of {_rollouts(rollouts)} were cut off (mean length "
        f"{metrics['rollout/response_length_mean']:.0f} tokens): the model is not seen to end a reply."
    )
    tokens = f"--rollout.max_new_tokens, which is {run.max_new_tokens}"
    return evidence, f"{tokens} (in several turns also --rollout.max_turns)"


def _no_gradient(metrics: Metrics, run: LearningSettings) -> bool | None:
    explained = _constant_reward(metrics, run) is not None or _no_spread(metrics, run)
    return (metrics.get("policy/grad_norm") == 0 and not explained) or None


def _describe_no_gradient(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"The gradient of the policy was 0 in {_rollouts(rollouts)} (mean size of an advantage "
        f"{metrics.get('advantage/abs_mean', 0.0):.3g}): the weights stay as they are."
    )
    return evidence, "--algo.advantage.estimator and the reward"


def _collapsed(metrics: Metrics, run: LearningSettings) -> bool | None:
    return metrics.get("rollout/entropy", 1.0) < COLLAPSED_ENTROPY or None


def _describe_collapsed(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"The entropy was below {COLLAPSED_ENTROPY} nats per token in {_rollouts(rollouts)} (now "
        f"{metrics['rollout/entropy']:.2g}): all samples of a prompt are nearly the same."
    )
    return evidence, "--rollout.temperature, --actor.adam.lr and --actor.entropy_coef"


def _no_step(metrics: Metrics, run: LearningSettings) -> bool | None:
    return metrics.get("train/grad_norm") == 0 or None


def _describe_no_step(metrics: Metrics, run: LearningSettings, steps: int) -> tuple[str, str]:
    evidence = f"The gradient was 0 in {_steps(steps)}: the weights stay as they are."
    return evidence, "the trained tokens (rollgrad data show), the loss and --actor.lora.target_modules"


def _reference_kept(metrics: Metrics, run: LearningSettings) -> bool | None:
    first = metrics.get("train/chosen_reward") == 0 and metrics.get("train/rejected_reward") == 0
    return (first and "train/chosen_fell_share" in metrics) or None


def _describe_reference_kept(metrics: Metrics, run: LearningSettings, steps: int) -> tuple[str, str]:
    evidence = f"All replies were exactly as likely as under the reference in {_steps(steps)}: nothing is learned."
    return evidence, "--actor.adam.lr, which is too low for the format of the weights, and --actor.dtype"


def _chosen_fell(metrics: Metrics, run: LearningSettings) -> bool | None:
    return metrics.get("train/chosen_fell_share") == 1 or None


def _describe_chosen_fell(metrics: Metrics, run: LearningSettings, steps: int) -> tuple[str, str]:
    evidence = (
        f"Every chosen reply of {_steps(steps)} was less likely than under the reference (mean log-prob now "
        f"{metrics['train/chosen_logprob']:.3g}): the model unlearns what it should prefer."
    )
    return evidence, "--actor.adam.lr and --dpo.beta, or add sft to --dpo.loss"


def _steps(count: int) -> str:
    return "the step" if count == 1 else f"{count} steps in a row"


def _rollouts(count: int) -> str:
    return "the rollout" if count == 1 else f"{count} rollouts in a row"


_RULES = {
    "constant_reward": _Rule(sign=_constant_reward, describe=_describe_constant_reward, no_update=True),
    "no_spread": _Rule(sign=_no_spread, describe=_describe_no_spread, no_update=True),
    "truncated": _Rule(sign=_truncated, describe=_describe_truncated),
    "no_gradient": _Rule(sign=_no_gradient, describe=_describe_no_gradient, no_update=True),
    "no_step": _Rule(sign=_no_step, describe=_describe_no_step, no_update=True),
    "reference_kept": _Rule(sign=_reference_kept, describe=_describe_reference_kept),
    "chosen_fell": _Rule(sign=_chosen_fell, describe=_describe_chosen_fell),
    "entropy_collapsed": _Rule(sign=_collapsed, describe=_describe_collapsed),
}


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
    _updates: int = 0
    _updates_without_gradient: int = 0

    def observe(self, step: int, metrics: Metrics) -> tuple["LearningWatch", tuple[Finding, ...]]:
        """Returns the watch after a step, and the findings that begin with it."""
        streaks, past, new = dict(self._streaks), list(self._past), list[Finding]()
        for name, rule in _RULES.items():
            window = min(WINDOW, self.run.steps) if rule.no_update else WINDOW
            streak, ended = _advance(streaks.get(name, _Streak()), step, rule.sign(metrics, self.run), window)
            past += [ended] if ended is not None else []
            if streak.finding is None and streak.seen >= window:
                evidence, look_at = rule.describe(metrics, self.run, streak.seen)
                finding = Finding(name=name, evidence=evidence, look_at=look_at, since=streak.first, until=step)
                streak = evolve(streak, finding=finding)
                new.append(finding)
            streaks[name] = streak
        grad_norm = metrics.get("policy/grad_norm", metrics.get("train/grad_norm"))
        watch = evolve(
            self,
            streaks=streaks,
            past=tuple(past),
            updates=self._updates + (grad_norm is not None),
            updates_without_gradient=self._updates_without_gradient + (grad_norm == 0),
        )
        return watch, tuple(new)

    def findings(self) -> tuple[Finding, ...]:
        """Returns all findings, those that still hold included, in order of their first step."""
        holding = (streak.finding for streak in self._streaks.values() if streak.finding is not None)
        return tuple(sorted((*self._past, *holding), key=lambda finding: finding.since))

    def summary(self) -> tuple[str, ...]:
        """Returns sentences for the end of the run: whether nothing was learned, then each finding with its steps."""
        lines = [f"steps {found.since} to {found.until}: {found}" for found in self.findings()]
        if self._updates and self._updates_without_gradient == self._updates:
            count = "the only update" if self._updates == 1 else f"all {self._updates} updates"
            lines.insert(0, f"Nothing was learned: the gradient was 0 in {count}.")
        elif any(f.name == "constant_reward" and (f.since, f.until) == (1, self.run.steps) for f in self.findings()):
            lines.insert(0, "Nothing was learned from the reward: every reply of the run had the same.")
        return tuple(lines)


def _advance(streak: _Streak, step: int, value: Any, window: int) -> tuple[_Streak, Finding | None]:
    """Returns the streak after one more step, and the finding that ends with it."""
    if value is not None and streak.seen and value == streak.value:
        finding = None if streak.finding is None else evolve(streak.finding, until=step)
        return evolve(streak, seen=streak.seen + 1, missing=0, finding=finding), None
    if streak.finding is not None and value is None and streak.missing + 1 < window:
        return evolve(streak, missing=streak.missing + 1), None
    fresh = _Streak() if value is None else _Streak(value=value, first=step, seen=1)
    return fresh, streak.finding
