"""Makes the examples of an offline trainer, prepared and reported, from the settings of `data` and `eval`."""

import math
import os
from collections.abc import Mapping, Sized
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import evolve

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.examples.preparation import PreparedExamples, prepare_examples
from rollgrad.adapters.data.examples.preparer import PreparationSettings, Preparer
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.adapters.data.examples.sources import LOOKED_AT, Head, Mixture, open_head, open_sources
from rollgrad.adapters.data.examples.streaming import StreamedExamples, stream_rows
from rollgrad.adapters.models.torch.loading import load_positions
from rollgrad.application.pipelines.epochs import TokenBudget, steps_left
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.examples import (
    DemonstrationDataConfig,
    ExampleDataConfig,
    ExampleEvalConfig,
    ExampleFormat,
    ExampleTrainConfig,
    LabelDataConfig,
    PairDataConfig,
    RowsConfig,
    StepDataConfig,
)
from rollgrad.application.settings.sft import SupervisedTrainConfig
from rollgrad.domain.episodes.prompts import PromptCursor
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.entrypoints.run_directory import begun, continues


def make_examples(
    data: RowsConfig,
    train: ExampleTrainConfig,
    model: str,
    tokenizer: Any,
    codec: TemplateCodec,
    *,
    check: bool = True,
) -> PreparedExamples:
    """Returns the examples to train on, of streamed ones the first; without `check` however many rows are dropped.

    Raises:
        DataError: data cannot be read, or more rows than allowed cannot be used.
        ConfigurationError: the tokenizer has no chat template, or cannot say where its tokens lie.
    """
    if isinstance(data, ExampleDataConfig) and data.stream:
        settings = preparation_settings(data, model, codec.template_kwargs)
        examples = prepare_examples(_head(data, settings), tokenizer, settings, cache_dir=None)
        examples.report.first_rows = True
        if check:
            examples.report.check(data.max_dropped, "data.dataset")
        return examples
    return _prepared(
        data,
        data.dataset,
        data.split,
        data.probs,
        train.seed,
        data.max_samples,
        model,
        tokenizer,
        codec.template_kwargs,
        "data.dataset",
        check=check,
    )


def make_stream(
    data: ExampleDataConfig, train: ExampleTrainConfig, model: str, tokenizer: Any, codec: TemplateCodec
) -> StreamedExamples:
    """Returns the examples of rows that are read while training goes on; raises as `make_examples`."""
    settings = preparation_settings(data, model, codec.template_kwargs)
    (source,) = _head(data, settings).parts
    return StreamedExamples(
        lambda: stream_rows(data.dataset, data.split),
        source.kind,
        Preparer(tokenizer, settings),
        buffer=data.shuffle_buffer,
        seed=train.seed,
        max_dropped=data.max_dropped,
        overlong=data.overlong,
    )


def _head(data: ExampleDataConfig, settings: PreparationSettings) -> Mixture:
    """Returns the first rows of a stream."""
    rows = list(islice(stream_rows(data.dataset, data.split), LOOKED_AT))
    head = Head([row.place for row in rows], [row.content for row in rows])
    return open_head(data.dataset, head, settings.reading)


def make_eval_examples(
    data: RowsConfig, evaluation: ExampleEvalConfig, model: str, tokenizer: Any, codec: TemplateCodec
) -> PreparedExamples:
    """Returns the held-out examples; raises as `make_examples`."""
    assert evaluation.dataset is not None
    return _prepared(
        data,
        evaluation.dataset,
        evaluation.split,
        None,
        0,
        evaluation.max_samples,
        model,
        tokenizer,
        codec.template_kwargs,
        "eval.dataset",
    )


def make_budget(train: SupervisedTrainConfig, examples: ExampleSource[Any]) -> TokenBudget | None:
    """Returns the token budget of a step; None where examples are counted."""
    if train.batch_tokens is None:
        return None
    known = examples.length if isinstance(examples, PreparedExamples) else None
    return TokenBudget(train.batch_tokens, known or (lambda index: len(examples[index])))


def make_total_steps(
    train: ExampleTrainConfig, examples: Sized, ckpt: CheckpointConfig, budget: TokenBudget | None = None
) -> int:
    """Returns the optimizer steps of the whole run: of a run that continues those that it took, and those that the rest
    of its epochs takes."""
    if train.max_steps is not None:
        return train.max_steps
    size = len(examples)
    done, cursor = starting_position(ckpt) or (0, PromptCursor(train.seed))
    total = size * train.num_epochs
    if budget is not None:
        return done + steps_left(cursor, size, total=total, budget=budget)
    return done + math.ceil(max(0, total - cursor.taken(size)) / train.batch_size)


def starting_position(ckpt: CheckpointConfig) -> tuple[int, PromptCursor] | None:
    """Returns the steps that a run which continues has taken, and its place in the examples; None for a run from its
    beginning, or if its training state does not say."""
    position = ((begun(ckpt) if continues(ckpt) else None) or {}).get("position")
    return None if position is None else (int(position["step"]), PromptCursor.from_state_dict(position))


def make_total_examples(train: ExampleTrainConfig, examples: Sized) -> int | None:
    """Returns how many examples the run takes, each as often as it has epochs; None where steps are counted."""
    return None if train.max_steps is not None else len(examples) * train.num_epochs


def cache_directory(data: RowsConfig) -> Path:
    """Returns where prepared data are kept."""
    return _own_cache() / "examples" if data.cache_dir is None else Path(data.cache_dir).expanduser()


def reference_directory(data: RowsConfig) -> Path:
    """Returns where log-probs of references are kept."""
    return (_own_cache() if data.cache_dir is None else cache_directory(data)) / "reference"


def _own_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollgrad"


def reading_settings(data: RowsConfig) -> ReadingSettings:
    """Returns how rows are read."""
    settings = ReadingSettings(
        apply_chat_template=data.apply_chat_template,
        system_prompt=data.system_prompt,
        input_template=data.input_template,
    )
    if isinstance(data, PairDataConfig):
        settings = evolve(
            settings,
            format=ExampleFormat.PAIRS,
            input_key=data.prompt_key,
            chosen_key=data.chosen_key,
            rejected_key=data.rejected_key,
        )
        if isinstance(data, LabelDataConfig):
            kind = ExampleFormat.UNPAIRED
            return evolve(settings, format=kind, output_key=data.completion_key, label_key=data.label_key)
        return settings
    if isinstance(data, StepDataConfig):
        return evolve(
            settings,
            format=ExampleFormat.STEPS,
            input_key=data.prompt_key,
            output_key=data.steps_key,
            label_key=data.labels_key,
            placeholder=data.placeholder,
            separator=data.separator,
            up_to_first_error=data.up_to_first_error,
        )
    assert isinstance(data, DemonstrationDataConfig)
    return evolve(
        settings, format=data.format, input_key=data.input_key, output_key=data.output_key, train_on=data.train_on
    )


def preparation_settings(data: RowsConfig, model: str, template_kwargs: Mapping[str, Any]) -> PreparationSettings:
    """Returns how rows become tokens; no example is longer than the model has positions."""
    positions = load_positions(model)
    return PreparationSettings(
        reading=reading_settings(data),
        max_tokens=data.max_tokens if positions is None else min(positions, data.max_tokens),
        overlong=data.overlong,
        template_kwargs=template_kwargs,
    )


def _prepared(
    data: RowsConfig,
    spec: str,
    split: str,
    probs: tuple[float, ...] | None,
    seed: int,
    max_samples: int | None,
    model: str,
    tokenizer: Any,
    template_kwargs: Mapping[str, Any],
    setting: str,
    *,
    check: bool = True,
) -> PreparedExamples:
    settings = preparation_settings(data, model, template_kwargs)
    mixture = open_sources(
        spec, split=split, probs=probs, seed=seed, max_samples=max_samples, settings=settings.reading
    )
    examples = prepare_examples(
        mixture,
        tokenizer,
        settings,
        cache_dir=cache_directory(data),
        num_workers=data.num_workers,
        setting=setting,
    )
    if check:
        examples.report.check(data.max_dropped, setting)
    return examples
