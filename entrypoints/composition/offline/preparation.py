"""Makes the examples of an offline trainer, prepared and reported, from the settings of `data` and `eval`."""

import math
from collections.abc import Callable, Sized
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import structlog
from attrs import evolve, frozen

from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.loading import origin
from rollgrad.adapters.data.datasets.several import distinct_names
from rollgrad.adapters.data.examples.preparation import prepare_examples
from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.adapters.data.examples.preparer import PreparationSettings, PreparedRow, Preparer
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.adapters.data.examples.sources import LOOKED_AT, Head, Mixture, open_head, open_sources
from rollgrad.adapters.data.examples.streaming import StreamedExamples, stream_rows
from rollgrad.adapters.models.torch.loading.loading import load_positions
from rollgrad.application.pipelines.epochs import TokenBudget, steps_left
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.examples import (
    ExampleDataConfig,
    ExampleEvalConfig,
    ExampleFormat,
    ExampleTrainConfig,
    LabelDataConfig,
    PairDataConfig,
    RankedReplies,
    RowsConfig,
    StepDataConfig,
)
from rollgrad.application.settings.sft import SupervisedTrainConfig
from rollgrad.domain.algorithms.evaluation import too_many_sets
from rollgrad.domain.episodes.prompts import PromptCursor
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.entrypoints.composition.fetching import make_fetched_images, own_cache
from rollgrad.entrypoints.run_directory import begun, continues

log = structlog.get_logger(__name__)

Example = TypeVar("Example")


@frozen(eq=False)
class Preparation:
    """Parts with which rows become examples: the settings of the data, the name of the model, its tokenizer and chat
    template, and what renders images, if rows have any."""

    data: RowsConfig
    model: str
    tokenizer: Any
    codec: TemplateCodec
    images: ImageRenderer | None = None

    @cached_property
    def settings(self) -> PreparationSettings:
        """Returns how rows become tokens; no example is longer than the model has positions."""
        positions = load_positions(self.model)
        return PreparationSettings(
            reading=reading_settings(self.data),
            max_tokens=self.data.max_tokens if positions is None else min(positions, self.data.max_tokens),
            overlong=self.data.overlong,
            template_kwargs=self.codec.template_kwargs,
        )

    def head(self) -> Mixture:
        """Returns the first rows of a stream."""
        rows = list(islice(stream_rows(self.data.dataset, self.data.split), LOOKED_AT))
        head = Head([row.place for row in rows], [row.content for row in rows])
        return open_head(self.data.dataset, head, self.settings.reading)


def make_examples(preparation: Preparation, train: ExampleTrainConfig, *, check: bool = True) -> PreparedExamples:
    """Returns the examples to train on, of streamed ones the first; without `check` however many rows are dropped.

    Raises:
        DataError: data cannot be read, or more rows than allowed cannot be used.
        ConfigurationError: the tokenizer has no chat template, or cannot say where its tokens lie.
    """
    data, settings = preparation.data, preparation.settings
    if data.stream:
        examples = prepare_examples(
            preparation.head(), preparation.tokenizer, settings, cache_dir=None, images=preparation.images
        )
        examples.report.first_rows = True
    else:
        mixture = open_sources(
            data.dataset,
            split=data.split,
            probs=data.probs,
            seed=train.seed,
            max_samples=data.max_samples,
            settings=settings.reading,
            cache_dir=cache_directory(data),
        )
        examples = _prepared(preparation, mixture, "data.dataset")
    if check:
        examples.report.check(data.max_dropped, "data.dataset")
    return examples


def make_stream(
    preparation: Preparation, train: ExampleTrainConfig, form: Callable[[PreparedRow, int], Example]
) -> StreamedExamples[Example]:
    """Returns the examples of rows that are read while training goes on, each as `form` makes it; raises as
    `make_examples`."""
    data = preparation.data
    (source,) = preparation.head().parts
    return StreamedExamples(
        lambda: stream_rows(data.dataset, data.split),
        source.kind,
        Preparer(preparation.tokenizer, preparation.settings, preparation.images),
        form,
        buffer=data.shuffle_buffer,
        seed=train.seed,
        max_dropped=data.max_dropped,
        overlong=data.overlong,
    )


def make_eval_examples(preparation: Preparation, evaluation: ExampleEvalConfig) -> PreparedExamples:
    """Returns the held-out examples; raises as `make_examples`."""
    assert evaluation.dataset is not None
    mixture = open_sources(
        evaluation.dataset,
        split=evaluation.split,
        probs=None,
        seed=0,
        max_samples=evaluation.max_samples,
        evenly=True,
        settings=preparation.settings.reading,
        cache_dir=cache_directory(preparation.data),
    )
    examples = _prepared(preparation, mixture, "eval.dataset")
    examples.report.check(preparation.data.max_dropped, "eval.dataset")
    names = examples.datasources()
    sets = set(names)
    if too_many := too_many_sets(sets):
        log.warning(too_many)
    return evolve(examples, names=names) if len(sets) > 1 and not too_many else examples


def note_repeated(held_out: object, learned: object) -> None:
    """Notes in the report on held-out examples how many of them are learned from, too, and warns of it; a caller's own
    examples, and those of a stream, are not compared."""
    if not isinstance(held_out, PreparedExamples) or not isinstance(learned, PreparedExamples):
        return
    if learned.report.first_rows:
        return
    repeated = held_out.repeated_in(learned)
    held_out.report.also_trained = len(repeated)
    if repeated:
        log.warning(
            f"{len(repeated)} of {len(held_out)} held-out examples of eval.dataset are in data.dataset, too, and tell "
            "nothing of new ones: leave them out of one of the two."
        )


def _prepared(preparation: Preparation, mixture: Mixture, setting: str) -> PreparedExamples:
    """Returns the examples of `mixture`, prepared or found in the cache; `setting` names the data in errors."""
    places = [part.name for part in mixture.parts]
    names = distinct_names(places, [origin(place) for place in places])
    examples = prepare_examples(
        mixture,
        preparation.tokenizer,
        preparation.settings,
        cache_dir=cache_directory(preparation.data),
        num_workers=preparation.data.num_workers,
        setting=setting,
        images=preparation.images,
    )
    return evolve(examples, datasources=partial(mixture.datasources, names))


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
    of its epochs takes. A step of more examples than there are rows is a warning."""
    if budget is None and isinstance(examples, PreparedExamples) and train.batch_size > len(examples):
        log.warning(
            "rows repeat within a step", rows=len(examples), batch_size=train.batch_size, flag="--train.batch_size"
        )
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
    return own_cache() / "examples" if data.cache_dir is None else Path(data.cache_dir).expanduser()


def reference_directory(data: RowsConfig) -> Path:
    """Returns where log-probs of references are kept."""
    return (own_cache() if data.cache_dir is None else cache_directory(data)) / "reference"


def reading_settings(data: RowsConfig) -> ReadingSettings:
    """Returns how rows are read."""
    settings = ReadingSettings(
        apply_chat_template=data.apply_chat_template,
        system_prompt=data.system_prompt,
        input_template=data.input_template,
        image_key=data.image_key,
        fetched=make_fetched_images(data),
    )
    if isinstance(data, PairDataConfig):
        settings = evolve(
            settings,
            format=ExampleFormat.PAIRS,
            input_key=data.prompt_key,
            chosen_key=data.chosen_key,
            rejected_key=data.rejected_key,
            all_pairs=data.pairs is RankedReplies.ALL,
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
    assert isinstance(data, ExampleDataConfig)
    return evolve(
        settings, format=data.format, input_key=data.input_key, output_key=data.output_key, train_on=data.train_on
    )


def check_positions(kind: str, name: str, run: OfflineRun) -> None:
    """Checks that a frozen model, `name`, has positions for the longest example allowed; `kind` says what it is.

    Raises:
        ConfigurationError: it has fewer.
    """
    positions, own = load_positions(name), load_positions(run.actor.model_name_or_path)
    longest = run.data.max_tokens if own is None else min(own, run.data.max_tokens)
    if positions is not None and positions < longest:
        raise ConfigurationError(
            f"The {kind} {name!r} has {positions} positions, but examples may have {longest} tokens, of which it "
            f"would predict the last ones badly: set --data.max_tokens {positions}."
        )
