"""`rollgrad export`, `rollgrad inspect` and `rollgrad report`: commands that read the directory of a run."""

import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
from attrs import define

from rollgrad.application.rollouts.exporting import KINDS
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.parsing import flag_kinds, parse
from rollgrad.entrypoints.cli.places import take_places


@define(kw_only=True)
class ExportArguments:
    """Writes rollouts of a run as JSONL rows for training on examples.

    pairs: the best and the worst reply of each group, for train dpo and train rm. sft: the best, as prompt and
    completion, for train sft. messages: every reply as a conversation. Replies that were cut off are left out, and so
    are rollouts of several turns; no row is written twice.
    """

    output: Path | None = None
    """File to write; by default pairs.jsonl, sft.jsonl or messages.jsonl in the run's directory. One that is there is
    never overwritten."""
    min_score: float | None = None
    """Least score of a reply that is to be imitated."""


def export_rollouts(arguments: Sequence[str]) -> int:
    """`rollgrad export`: exports, and says on stderr what was left out; the file is the one line on stdout.

    Raises:
        RollgradError: a word is wrong, the run has nothing to export, or the file cannot be written.
    """
    named, words = take_places(arguments, flag_kinds(ExportArguments))
    parsed = parse(ExportArguments(), "export", words)
    if len(named) != 2 or named[0] not in KINDS:
        raise ConfigurationError(
            f"export takes the kind of rows and the directory of a run: rollgrad export {'|'.join(KINDS)} runs/first."
        )
    from rollgrad.entrypoints.export import export

    kind, run = named
    exported = export(kind, Path(run), parsed.output, min_score=parsed.min_score)
    for reason in exported.unread:
        sys.stderr.write(f"warning: {reason}\n")
    for reason, count in exported.left_out.most_common():
        sys.stderr.write(f"left out: {count} {reason}\n")
    if exported.plain:
        sys.stderr.write("prompts are texts as the model saw them: train with --data.apply_chat_template False\n")
    sys.stderr.write(f"{exported.rows} rows\n")
    sys.stdout.write(f"{exported.path}\n")
    return 0


def _run(command: str, kind: type[attrs.AttrsInstance], arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns the directory of a run that a command line names, and the other words; `kind`: the command's arguments.

    Raises:
        ConfigurationError: there are several directories.
    """
    named, words = take_places(arguments, flag_kinds(kind))
    if len(named) > 1:
        raise ConfigurationError(
            f"{command} takes one run, but there are {', '.join(named)}: name one of them, or see several side by side "
            "with rollgrad ui."
        )
    return next(iter(named), None), words


@define(kw_only=True)
class ReportArguments:
    """Writes the page of a run with a choice of its rollouts into one HTML file, which opens by a double click, needs
    no server, and is at most 3 MB large."""

    output: Path | None = None
    """File to write; by default report.html in the run's directory, which is replaced."""


def report_of_run(arguments: Sequence[str]) -> int:
    """`rollgrad report`: the file is the one line on stdout.

    Raises:
        RollgradError: a word is wrong, there is no run, or the file cannot be written.
    """
    named, words = _run("report", ReportArguments, arguments)
    parsed = parse(ReportArguments(), "report", words)
    if named is None:
        raise ConfigurationError("report takes the directory of a run: rollgrad report runs/first.")
    from rollgrad.entrypoints.ui.report import write_run_report
    from rollgrad.entrypoints.ui.without_pandas import without_pandas

    with without_pandas():
        written = write_run_report(Path(named), parsed.output)
    sys.stdout.write(f"{written}\n")
    return 0


@define(kw_only=True)
class InspectArguments:
    """Shows how a run goes or ended: its status, where metrics began and are, and what keeps it from learning; also of
    one that is going on or was killed."""

    json: bool = False
    """Print JSON."""
    md: bool = False
    """Print Markdown."""


def inspect_run(arguments: Sequence[str]) -> int:
    """`rollgrad inspect`.

    Raises:
        RollgradError: a word is wrong, or there is no run.
    """
    named, words = _run("inspect", InspectArguments, arguments)
    parsed = parse(InspectArguments(), "inspect", words)
    if named is None:
        raise ConfigurationError("inspect takes the directory of a run: rollgrad inspect runs/first.")
    if parsed.json and parsed.md:
        raise ConfigurationError("--json and --md are both set, but there is one output: leave one of them out.")
    from rollgrad.entrypoints.inspection import inspect
    from rollgrad.entrypoints.run_record import await_heartbeat

    await_heartbeat(Path(named), lambda line: sys.stderr.write(f"{line}\n"))
    found = inspect(Path(named))
    sys.stdout.write(found.as_json() if parsed.json else found.as_markdown() if parsed.md else found.as_text())
    return 0
