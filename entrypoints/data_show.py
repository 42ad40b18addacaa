"""`rollgrad data show`: rows as the model is trained on them, with the trained tokens coloured, and the report."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.adapters.data.examples.report import DataReport
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.sections.examples import LabelDataConfig, PairDataConfig
from rollgrad.entrypoints.composition.chat import make_codec, make_image_renderer, make_tokenizer
from rollgrad.entrypoints.composition.offline.preparation import (
    Preparation,
    make_eval_examples,
    make_examples,
    note_repeated,
)
from rollgrad.entrypoints.terminal_text import without_commands

TRAINED, CONTEXT = "bold green", "dim"
OPEN, CLOSE = "⟦", "⟧"
"""Marks around trained tokens if there are no colours."""


def show_rows(run: OfflineRun, *, count: int) -> None:
    """Prepares the examples of `run`, and prints the first `count` of them and the report to stdout.

    Raises:
        RollgradError: data cannot be read, or more rows than allowed cannot be used (after the report).
    """
    preparation, examples = prepared_rows(run)
    show_examples(
        run, preparation, examples, count, Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
    )
    examples.report.check(run.data.max_dropped, "data.dataset")


def prepared_rows(run: OfflineRun) -> tuple[Preparation, PreparedExamples]:
    """Returns the examples of `run`, however many rows cannot be used, and how they were made.

    Raises:
        RollgradError: data cannot be read.
    """
    preparation = _preparation(run)
    return preparation, make_examples(preparation, run.train, check=False)


def show_examples(
    run: OfflineRun, preparation: Preparation, examples: PreparedExamples, count: int, console: Console
) -> None:
    """Prints the first `count` of the examples, and the report."""
    shown = 0
    for index in range(min(count, len(examples))):
        example = examples[index]
        for number, branch in enumerate(example.branches, 1):
            of = f", branch {number} of {len(example.branches)}" if len(example.branches) > 1 else ""
            if isinstance(run.data, LabelDataConfig):
                of = ", good" if examples.labels[shown] else ", bad"
            elif isinstance(run.data, PairDataConfig):
                of = ", chosen" if number == 1 else ", rejected"
            shown += 1
            console.print(
                f"row {example.row + 1}{of}: {len(branch)} tokens, {branch.trained_length} trained", style="bold"
            )
            console.print(
                coloured(preparation.tokenizer, branch.token_ids_T.tolist(), branch.weights_T.tolist(), console)
            )
            console.print()
    show_report(f"{run.data.dataset}", examples.report, console)


def show_held_out(run: OfflineRun, learned: PreparedExamples, console: Console) -> None:
    """Prepares the held-out examples of `run`, if it has any, and prints their report.

    Raises:
        RollgradError: data cannot be read, or more rows than allowed cannot be used.
    """
    if run.eval.dataset is None:
        return
    examples = make_eval_examples(_preparation(run), run.eval)
    note_repeated(examples, learned)
    show_report(run.eval.dataset, examples.report, console)


def _preparation(run: OfflineRun) -> Preparation:
    tokenizer = make_tokenizer(run.actor, run.data)
    images = make_image_renderer(run.actor, run.data, tokenizer)
    return Preparation(run.data, run.actor.model_name_or_path, tokenizer, make_codec(run.data, tokenizer), images)


def coloured(tokenizer: Any, token_ids: list[int], weights: list[float], console: Console) -> Text:
    """Returns the text of tokens, the trained ones in a colour, and between brackets where there are none."""
    text = Text()
    start = 0
    while start < len(token_ids):
        stop, trained = start, weights[start] > 0
        while stop < len(token_ids) and (weights[stop] > 0) == trained:
            stop += 1
        # Runs, not single tokens, are decoded: a character may take several tokens.
        written = without_commands(tokenizer.decode(token_ids[start:stop], clean_up_tokenization_spaces=False))
        if trained and not console.is_terminal:
            written = f"{OPEN}{written}{CLOSE}"
        text.append(written, style=TRAINED if trained else CONTEXT)
        start = stop
    return text


def show_report(title: str, report: DataReport, console: Console | None = None) -> None:
    """Prints the report of a dataset; to stderr by default."""
    console = console or Console(stderr=True, highlight=False, markup=False)
    table = Table(title=f"Data: {title}", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in report.lines():
        table.add_row(name, value)
    console.print(table)
