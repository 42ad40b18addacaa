"""Stand-ins for modules of OpenRLHF and OpenRLHF-Agent, which files written for them import.

`install()` adds a finder at the end of Python's list. Python tries finders in order, so this one gets only modules that
no other has: a package that is really installed always wins, and nothing is added to it or replaced in it. The finder
has the modules in `STAND_INS`, with the names listed there. It stays installed, so that an import inside a function,
which runs long after the file was loaded, finds the same modules. `importlib.util.find_spec` finds no stand-in, so that
no library chooses vLLM because of one; only after a file has imported a stand-in does Python list it.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_AGENT = "rollgrad.adapters.openrlhf.agent_library"
_SHIM = "rollgrad.adapters.openrlhf.shim"
_UTILS = "rollgrad.adapters.openrlhf.utils"

STAND_INS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "openrlhf": {},
    "openrlhf.utils": {_UTILS: ("extract_boxed_answer", "grade_answer")},
    "openrlhf.utils.agent": {_SHIM: ("AgentExecutorBase", "AgentInstanceBase", "MultiTurnAgentExecutor")},
    "openrlhf.utils.logging_utils": {_UTILS: ("init_logger",)},
    "openrlhf_agent": {
        f"{_AGENT}.agent": ("AgentRuntime", "AgentSession"),
        f"{_AGENT}.environment": ("make_environment",),
        f"{_AGENT}.model": ("LLMEngine", "OpenAIEngine"),
        f"{_AGENT}.template": ("make_chat_protocol", "make_template"),
        f"{_AGENT}.types": ("AgentStepResult",),
    },
    "openrlhf_agent.agent": {
        f"{_AGENT}.agent": ("AgentRuntime", "AgentSession"),
        f"{_AGENT}.types": ("AgentStepResult",),
    },
    "openrlhf_agent.chat_protocol": {f"{_AGENT}.template": ("make_chat_protocol",)},
    "openrlhf_agent.engine": {f"{_AGENT}.model": ("LLMEngine", "OpenAIEngine")},
    "openrlhf_agent.environment": {
        f"{_AGENT}.environment": ("DefaultEnvironment", "Environment", "ReActEnvironment", "make_environment"),
        f"{_AGENT}.tools": ("FinalTool", "ThinkTool", "ToolBase", "ToolRegistry"),
    },
    "openrlhf_agent.model": {f"{_AGENT}.model": ("LLMEngine", "OpenAIEngine")},
    "openrlhf_agent.orchestrator": {
        f"{_AGENT}.agent": ("AgentRuntime", "AgentSession"),
        f"{_AGENT}.types": ("AgentStepResult",),
    },
    "openrlhf_agent.template": {f"{_AGENT}.template": ("Qwen3Template", "Template", "make_template")},
    "openrlhf_agent.types": {f"{_AGENT}.types": ("ToolCall", "ToolResult")},
    "vllm": {_SHIM: ("SamplingParams",)},
}
"""Stand-in modules, each with the modules that its names come from. Dots in names make submodules."""

_IMPORT_STATEMENT = "_find_and_load_unlocked"
"""Function of Python's import system that is called by import statements, but not by `find_spec`."""


class StandInFinder(MetaPathFinder, Loader):
    """Finds and makes the modules of `STAND_INS`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a stand-in, None for any other module.

        Raises:
            ModuleNotFoundError: it belongs to a package with stand-ins, but is none of them.
        """
        root = fullname.partition(".")[0]
        if root not in STAND_INS or sys._getframe(2).f_code.co_name != _IMPORT_STATEMENT:
            return None
        if root != fullname and getattr(sys.modules.get(root), "__loader__", None) is not self:
            return None
        if fullname not in STAND_INS:
            known = ", ".join(name for name in STAND_INS if name.partition(".")[0] == root)
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: {root} is not installed, and rollgrad stands in for {known} only: "
                f"install {root} for the rest, which then comes before all stand-ins",
                name=fullname,
            )
        is_package = any(name.startswith(f"{fullname}.") for name in STAND_INS)
        return ModuleSpec(fullname, self, origin="rollgrad", is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module with its names."""
        for source, names in STAND_INS[module.__name__].items():
            implementation = importlib.import_module(source)
            for name in names:
                setattr(module, name, getattr(implementation, name))


_FINDER = StandInFinder()


def install() -> None:
    """Makes the stand-ins importable from now on; idempotent."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
