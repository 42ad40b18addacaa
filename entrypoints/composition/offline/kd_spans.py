"""The examples of `rollgrad train kd` with a teacher that has other tokens: the data as its tokenizer and chat template
write them, and the log-probs of the spans that both models have."""

from collections.abc import Sequence
from typing import Any

import structlog
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.chat.token_bytes import token_texts
from rollgrad.adapters.checkpoints.fingerprint import model_fingerprint
from rollgrad.adapters.checkpoints.score_files import ScoreFiles
from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.adapters.models.torch.loading.loading import load_positions, load_tokenizer
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.application.learning.spans import Counterparts, compared, span_logprobs, spans_of, with_spans
from rollgrad.application.settings.derived import tokens_per_pass
from rollgrad.application.settings.kd import KDRun
from rollgrad.application.settings.sections.examples import LongRows
from rollgrad.domain.episodes.examples import Demonstration
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import ReferenceModel
from rollgrad.entrypoints.composition.chat import make_codec
from rollgrad.entrypoints.composition.models import make_actor_model
from rollgrad.entrypoints.composition.offline.preparation import (
    Preparation,
    make_eval_examples,
    make_examples,
    reference_directory,
)
from rollgrad.entrypoints.composition.offline.reference import reference_key
from rollgrad.entrypoints.composition.served import check_same_weights, make_served, served_fingerprint

log = structlog.get_logger(__name__)

TEACHER_FLAG = "--teacher.model_name_or_path"
LEARNED = "data.dataset"
FIRST = 128
"""Examples by which it is told before the teacher is loaded how much is compared."""
FEW = 0.9
"""Share of trained tokens in compared spans below which there is a warning."""


def make_spans(
    run: KDRun, examples: PreparedExamples | ExampleSource[Demonstration], tokenizer: Any, setting: str
) -> ExampleSource[Demonstration]:
    """Returns the examples with the teacher's log-probs of their spans; `setting` names the data.

    Raises:
        ConfigurationError: they are a caller's own, the teacher writes no text of them as the student does, or a server
            has another model than before.
        EngineError: a server does not answer.
    """
    prepared = _prepared(examples, setting)
    name = run.teacher.model_name_or_path
    its = load_tokenizer(name, flag=TEACHER_FLAG)
    counterparts, fingerprint = _counterparts(run, tokenizer, its, setting)
    served = None if run.teacher.url is None else make_served(run.teacher, name, its)
    model = model_fingerprint(name, whole=True) if served is None else served_fingerprint(served)
    key = reference_key(run, model, f"{prepared.fingerprint} {fingerprint}", compared="spans")
    store, budget = ScoreFiles(None if key is None else reference_directory(run.data)), tokens_per_pass(run)
    if served is not None:
        _check_kept(store.load(str(key)), prepared, counterparts, served.reference, budget)

    def make_teacher() -> ReferenceModel:
        _check_first(prepared, counterparts, name, setting)  # before an hour in vain
        if served is not None:
            return served.reference
        return TorchReference(make_actor_model(run.actor, name, TEACHER_FLAG))

    found = with_spans(prepared, counterparts, make_teacher, store, key=str(key), max_tokens=budget, name=setting)
    _check_compared(found.scores, name, setting)
    return found


def check_spans(run: KDRun, examples: PreparedExamples, tokenizer: Any) -> None:
    """Checks, without the teacher's weights, that it writes text of the first examples as the student does.

    Raises:
        ConfigurationError: it writes none.
    """
    its = load_tokenizer(run.teacher.model_name_or_path, flag=TEACHER_FLAG)
    counterparts, _ = _counterparts(run, tokenizer, its, LEARNED)
    _check_first(examples, counterparts, run.teacher.model_name_or_path, LEARNED)


def _prepared(examples: PreparedExamples | ExampleSource[Demonstration], setting: str) -> PreparedExamples:
    if isinstance(examples, PreparedExamples):
        return examples
    raise ConfigurationError(
        f"kd.spans has the teacher read the rows by its own tokenizer, but the examples of {setting} are the caller's "
        "own tokens: leave --kd.spans out."
    )


def _counterparts(run: KDRun, tokenizer: Any, its: Any, setting: str) -> tuple[Counterparts, str]:
    """Returns the examples as the teacher reads them by `its` tokenizer, and their fingerprint."""
    read = _as_read(run, its, setting)
    places = {row: index for index, row in enumerate(read.rows.tolist())}
    return (
        Counterparts(
            by_row=lambda row: read[places[row]] if row in places else None,
            own=token_texts(tokenizer),
            theirs=token_texts(its),
        ),
        read.fingerprint,
    )


def _as_read(run: KDRun, tokenizer: Any, setting: str) -> PreparedExamples:
    """Returns the data as the teacher reads them: rows that it has no positions for are left out."""
    name = run.teacher.model_name_or_path
    values = run.data.chat_template_kwargs or {}
    data = evolve(
        run.data,
        max_tokens=load_positions(name) or run.data.max_tokens,
        overlong=LongRows.DROP,
        max_dropped=1.0,
        chat_template_kwargs={key: values[key] for key in values if key in str(tokenizer.chat_template)},
    )
    preparation = Preparation(data, name, tokenizer, make_codec(data, tokenizer))
    if setting == LEARNED:
        return make_examples(preparation, run.train, check=False)
    return make_eval_examples(preparation, run.eval)


def _check_first(examples: PreparedExamples, counterparts: Counterparts, name: str, setting: str) -> None:
    columns = []
    for index in range(min(FIRST, len(examples))):
        example = examples[index]
        other = counterparts.by_row(example.row)
        trained = 0 if other is None else sum(branch.trained_length for branch in other.branches)
        columns.append(span_logprobs(example, other, torch.zeros(trained), counterparts))
    some = len(columns) < len(examples)  # others may have what these lack
    _check_compared(columns, name, f"the first {len(columns)} examples of {setting}", some=some)


def _check_kept(
    kept: Sequence[Tensor],
    examples: PreparedExamples,
    counterparts: Counterparts,
    teacher: ReferenceModel,
    budget: int,
) -> None:
    """Compares a server's answers that were kept with its answers now, by the first example for which it has an answer.

    Raises:
        ConfigurationError: they differ by more than rounding.
    """
    for index, before in enumerate(kept):
        told = before <= 0
        if bool(told.any()):
            (now,) = spans_of([examples[index]], counterparts, teacher, budget)
            check_same_weights(float((now - before)[told].abs().mean()), "--teacher.url")
            return


def _check_compared(scores: Sequence[Tensor], name: str, setting: str, *, some: bool = False) -> None:
    spans, tokens, total = compared(scores)
    if not spans and not some:
        raise ConfigurationError(
            f"kd.spans finds no text of the trained tokens of {setting} that the tokenizers and chat templates of both "
            f"models write alike, or the teacher {name!r} has no positions for it, so that it teaches nothing: look at "
            "the rows with `rollgrad data show --actor.model_name_or_path` of either model."
        )
    told = f"{spans:,} spans are compared, of {tokens:,} of the {total:,} trained tokens of {setting}"
    if tokens < FEW * total:
        log.warning(
            f"{told}: the teacher's chat template writes the other replies otherwise, or has no positions for them."
        )
    else:
        log.info(told)
