"""docs/openrlhf.md lists every flag of OpenRLHF and TRL that is not honoured, each with the reason that is told."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rollgrad.entrypoints.names.flags import Program
from rollgrad.entrypoints.names.names_of_openrlhf import TRAINER
from rollgrad.entrypoints.names.names_of_trl_commands import COMMANDS
from rollgrad.entrypoints.openrlhf.examples import TRAINERS
from rollgrad.entrypoints.openrlhf.inference import INFERENCE
from rollgrad.entrypoints.openrlhf.merge import COMBINER
from rollgrad.entrypoints.openrlhf.serve import SERVER

PAGE = Path(__file__).resolve().parents[3] / "docs" / "openrlhf.md"
TOOLS: Mapping[str, tuple[Program, ...]] = {
    "OpenRLHF": (TRAINER, *(trainer.program for trainer in TRAINERS.values()), SERVER, INFERENCE, COMBINER),
    "TRL": tuple(COMMANDS.values()),
}


def rows(tool: str) -> Iterator[str]:
    """The lines of a tool's table: the flags that have a reason in common, and the reason."""
    spelled: dict[str, set[str]] = {}
    for program in TOOLS[tool]:
        for name, targets in program.names.items():
            for reason in (program.flags[target].reason for target in targets):
                if reason is not None:
                    spelled.setdefault(reason, set()).add(name)
    for reason, names in sorted(spelled.items(), key=lambda item: sorted(item[1])):
        yield f"| {', '.join(f'`{name}`' for name in sorted(names))} | {reason.rstrip('.')} |"


@pytest.mark.parametrize("tool", TOOLS)
def test_the_page_lists_them(tool: str) -> None:
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {tool}\n")[2].partition("\n## ")[0]
    listed = [line for line in section.splitlines() if line.startswith("| `")]
    assert listed == list(rows(tool)), "write these lines into the page:\n" + "\n".join(rows(tool))
