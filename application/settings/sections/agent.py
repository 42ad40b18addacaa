"""The section `agent`: how agents play."""

from enum import StrEnum

from attrs import define

from rollgrad.domain.episodes.messages import RESULT_CHARACTERS
from rollgrad.domain.settings import COUNT, Condition, Range, setting


class PythonIsolation(StrEnum):
    """Isolation of the python tool's code."""

    NAMESPACES = "namespaces"
    """Linux namespaces, besides limits: no network, no other processes, no files of yours."""
    NONE = "none"
    """Limits alone: the code may do what you may do."""


CONVERSES = Condition(
    lambda here, run: here.converses,
    "there are no tools and a single attempt",
    "use --data.system_prompt, or set --agent.tools",
)
RESULT = Range(lambda value: value >= 100, "at least 100")
WITH_TOOLS = Condition(
    lambda here, run: here.tools is not None, "the model has no tools", "set --agent.tools, or leave it out"
)
WITH_PYTHON = Condition(
    lambda here, run: "python" in [name.strip() for name in (here.tools or "").split(",")],
    "only the python tool reads it",
    "add python to --agent.tools",
)


@define(kw_only=True)
class AgentConfig:
    """Episodes in which the model calls tools, tries again, or is driven by a program of its own."""

    tools: str | None = setting(
        None,
        "What the model may call, separated by commas: python (a sandbox), think, final, files (tools.py) or "
        "modules (my_lib.tools) whose functions are marked with @rollgrad.tool, MCP servers (mcp:COMMAND or mcp:URL).",
    )
    python_isolation: PythonIsolation = setting(
        PythonIsolation.NAMESPACES,
        "What shuts in the code that the python tool runs: namespaces (an error says how to allow them), or none, "
        "where the code may do all that you may do.",
        only_if=WITH_PYTHON,
    )
    max_result_chars: int = setting(
        RESULT_CHARACTERS,
        "Characters that the model is shown of a tool's result: of a longer one the beginning and the end, with a line "
        "between them that says how many are left out. In English and code, four are about a token.",
        RESULT,
        only_if=WITH_TOOLS,
    )
    system_prompt: str | None = setting(
        None, "Put before the conversation, unless it has a system message.", only_if=CONVERSES
    )
    attempts: int = setting(
        1, "Answers that the model may give; one that does not pass is told so, and may be followed by another.", COUNT
    )
    command: str | None = setting(
        None,
        "Program that plays an episode as a client of the run's OpenAI- and Anthropic-compatible server, whose "
        "address and key are in its environment; the prompt is on its standard input, its last line of output is the "
        "answer.",
    )

    @property
    def converses(self) -> bool:
        """Whether rollgrad leads the conversation, with tools or several attempts."""
        return self.tools is not None or self.attempts > 1

    @property
    def plays(self) -> bool:
        """Whether episodes have several turns."""
        return self.converses or self.command is not None
