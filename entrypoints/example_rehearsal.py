"""`--dry_run` of a run over examples: prepares its data, checks all that it would refuse before its first step, and
reports all problems at once.

Does not own: rules across settings (`application.settings`), files and memory (`dry_run`).
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.application.settings.kd import KDRun
from rollgrad.application.settings.kto import KTORun
from rollgrad.application.settings.offline import OfflineRun, ReferencedRun
from rollgrad.application.settings.prm import PRMRun
from rollgrad.application.settings.rm import RMRun
from rollgrad.application.settings.sft import SFTRun
from rollgrad.application.settings.still_weights import still_sentences
from rollgrad.domain.errors import ConfigurationError, RollgradError
from rollgrad.entrypoints.composition.adapters import check_writer, without_weights
from rollgrad.entrypoints.composition.offline.kd import check_teacher, datasources_of
from rollgrad.entrypoints.composition.offline.kd_spans import check_spans
from rollgrad.entrypoints.composition.offline.kto import check_labels, make_labels
from rollgrad.entrypoints.composition.offline.preparation import make_budget, make_total_steps
from rollgrad.entrypoints.composition.offline.reference import check_reference
from rollgrad.entrypoints.composition.offline.rm import make_compared
from rollgrad.entrypoints.composition.outputs import load_on_step, load_trackers
from rollgrad.entrypoints.composition.own_optimizer import check_own_optimizers
from rollgrad.entrypoints.composition.packages import check_packages
from rollgrad.entrypoints.composition.vocabulary import reward_token_ids
from rollgrad.entrypoints.data_show import prepared_rows, show_examples, show_held_out
from rollgrad.entrypoints.dry_run import example_file_problems
from rollgrad.entrypoints.example_plan import show_example_plan
from rollgrad.entrypoints.findings import Findings
from rollgrad.entrypoints.planned_machine import knows_machines


def rehearse_examples(run: OfflineRun, errors: Sequence[RollgradError]) -> None:
    """Prints the verdict, memory plan, counts, a row, reports of the data, and the settings that differ from defaults.

    Args:
        run: the run.
        errors: problems of its settings, with which no data are prepared.

    Raises:
        RollgradError: `errors`, and all other problems that would stop the run.
    """
    findings = Findings(errors)
    unset = {} if run.actor.adam.lr is not None else {"actor.adam.lr": f"{run.actor.peak_lr:g}"}
    with contextlib.redirect_stdout(sys.stderr), findings.told(run, unset):  # what libraries print
        findings.errors += example_file_problems(run)
        if not findings.errors:
            _try(run, findings)


def counts(run: OfflineRun, examples: PreparedExamples) -> str:
    """Returns the counts of a run over these examples as a sentence; of streamed rows the number is not known."""
    learned = make_labels(examples) if isinstance(run, KTORun) else examples
    size, budget = f"{run.train.batch_size:,} examples", None
    if isinstance(run, SFTRun) and run.train.batch_tokens is not None:
        size, budget = f"{run.train.batch_tokens:,} tokens", make_budget(run.train, examples)
    steps = make_total_steps(run.train, learned, run.ckpt, budget)
    rows = "" if run.data.stream else f"{len(learned):,} examples; "
    return f"Counts: {rows}{steps:,} optimizer steps of {size}."


def _try(run: OfflineRun, findings: Findings) -> None:
    """Prepares the data, and runs all checks that need them."""
    findings.attempt(partial(check_packages, run))
    findings.attempt(partial(check_writer, run))
    findings.attempt(partial(load_on_step, run.train.on_step_path))
    findings.attempt(partial(load_trackers, run.logger.report_to))
    findings.attempt(partial(check_own_optimizers, run))
    if (prepared := findings.attempt(partial(prepared_rows, run))) is None:
        return
    preparation, examples = prepared
    if len(examples):
        _plan(run, findings, longest=run.data.max_tokens if run.data.stream else examples.report.lengths["p100"])
        findings.say(findings.attempt(partial(counts, run, examples)) or "")
    for sentence in (*without_weights(run), *still_sentences(run)):
        findings.say(sentence)
    show_examples(run, preparation, examples, 1, findings.console)
    findings.attempt(partial(examples.report.check, run.data.max_dropped, "data.dataset"))
    findings.attempt(partial(show_held_out, run, examples, findings.console))
    if len(examples):
        for check in _checks(run, examples, preparation.tokenizer):
            findings.attempt(check)


def _plan(run: OfflineRun, findings: Findings, *, longest: int) -> None:
    shortages = findings.attempt(partial(show_example_plan, run, findings.console, longest=longest))
    for sentence in shortages or ():
        if knows_machines(run.cluster):
            findings.errors.append(ConfigurationError(sentence))
        else:  # the cluster's machines are not this one
            findings.say(sentence)


def _checks(run: OfflineRun, examples: PreparedExamples, tokenizer: Any) -> Iterator[Callable[[], Any]]:
    """Yields what a trainer checks of its models and of its data."""
    if isinstance(run, ReferencedRun):
        yield partial(check_reference, run, tokenizer)
    if isinstance(run, KTORun):
        yield partial(check_labels, run, examples)
    if isinstance(run, KDRun):
        yield partial(check_teacher, run, tokenizer)
        yield partial(datasources_of, run, examples, "data.dataset")
        if run.kd.spans:
            yield partial(check_spans, run, examples, tokenizer)
    if isinstance(run, RMRun):
        yield partial(make_compared, run, examples, "data.dataset")
    if isinstance(run, PRMRun):
        yield partial(reward_token_ids, run.prm.reward_tokens, tokenizer)
