"""Rules of how agents play. See `validation`."""

from collections.abc import Iterator

from rollgrad.application.settings.derived import first_change
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.agent import AgentConfig


def agent_problems(config: RLConfig, *, has_environment: bool) -> Iterator[str]:
    """Yields the problems of the settings of `agent`. `has_environment`: an environment or agent file plays."""
    agent = config.agent
    changed = first_change(agent, AgentConfig())
    if has_environment and changed:
        yield (
            f"agent.{changed} is {getattr(agent, changed)!r}, but an environment plays the episodes: leave out "
            f"--agent.{changed} or --train.agent_func_path (environment= in Python)."
        )
    if agent.command is not None and agent.converses:
        other = "tools" if agent.tools is not None else "attempts"
        yield (
            f"agent.command is {agent.command!r}, which leads its own conversation, but agent.{other} is "
            f"{getattr(agent, other)!r}: leave out --agent.command or --agent.{other}."
        )
    if agent.plays and not config.data.apply_chat_template:
        yield (
            "agent needs chat messages, but data.apply_chat_template is off: turn on --data.apply_chat_template, or "
            "leave the settings of agent out."
        )
