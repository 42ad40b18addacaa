"""`rollgrad export`: commands that read the directory of a run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import define

from rollgrad.application.rollouts.exporting import KINDS
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.parsing import parse


@define(kw_only=True)
class ExportArguments:
    """Writes rollouts of a run as JSONL rows for training on examples: rollgrad export pairs|sft|messages RUN.

    pairs: the best and the worst reply of each group, for train dpo and train rm. sft: the best, as prompt and
    completion, for train sft. messages: every reply as a conversation. Replies that were cut off are left out, and so
    are rollouts of several turns; no row is written twice.
    """

    output: Path | None = None
    """File to write; by default pairs.jsonl, sft.jsonl or messages.jsonl in the run's directory. One that is there is
    never overwritten."""
    min_score: float | None = None
    """Least score of a reply that is to be imitated."""


def export_rollouts(arguments: Sequence[str]) -> None:
    """Exports, and says on stderr what was left out; the file is the one line on stdout.

    Raises:
        RollgradError: a word is wrong, the run has nothing to export, or the file cannot be written.
    """
    words = list(arguments)
    named: list[str] = []
    while words and len(named) < 2 and not words[0].startswith("-"):
        named.append(words.pop(0))
    parsed = parse(ExportArguments(), "export", words)
    if len(named) < 2 or named[0] not in KINDS:
        raise ConfigurationError(
            f"export takes the kind of rows and the directory of a run: rollgrad export {'|'.join(KINDS)} runs/first."
        )
    from rollgrad.entrypoints.export import export

    kind, run = named
    exported = export(kind, Path(run), parsed.output, min_score=parsed.min_score)
    for reason, count in exported.left_out.most_common():
        sys.stderr.write(f"left out: {count} {reason}\n")
    if exported.plain:
        sys.stderr.write("prompts are texts as the model saw them: train with --data.apply_chat_template False\n")
    sys.stderr.write(f"{exported.rows} rows\n")
    sys.stdout.write(f"{exported.path}\n")
