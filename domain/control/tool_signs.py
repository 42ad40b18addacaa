"""Signs in the episodes of agents. Pure."""

from rollgrad.domain.control.rule import LearningSettings, Metrics, Rule, in_rollouts

FAILED_CALLS = 0.9
"""Share of failed calls from which on the tools, or the model's way of calling them, do not work: a model that learns
to call them gets results of some calls."""


def _tools_fail(metrics: Metrics, run: LearningSettings) -> bool | None:
    calls = metrics.get("reward/tool_calls", 0.0)
    return (calls > 0 and metrics.get("reward/tool_errors", 0.0) >= FAILED_CALLS * calls) or None


def _describe_tools_fail(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    calls = metrics["reward/tool_calls"]
    evidence = (
        f"{metrics['reward/tool_errors'] / calls:.0%} of the calls of tools failed in {in_rollouts(rollouts)} (the "
        f"latest had {calls:.2g} calls an episode): the model gets no results to learn with."
    )
    return evidence, "what --agent.tools names, tool_failed in the log, and samples.jsonl for calls that do not fit"


TOOL_RULES = {"tools_fail": Rule(sign=_tools_fail, describe=_describe_tools_fail)}
