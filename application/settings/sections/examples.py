"""The sections `actor`, `data`, `train` and `eval` of trainers that learn from examples."""

from collections.abc import Sequence
from decimal import Decimal
from enum import StrEnum
from typing import Any, ClassVar

from attrs import Attribute, define, evolve

from rollgrad.application.settings.sections.actor import ModelConfig, frozen_tower_setting
from rollgrad.application.settings.sections.data import WITH_TEMPLATE, WITHOUT_TEMPLATE
from rollgrad.application.settings.sections.images import FetchImages, fetch_setting
from rollgrad.application.settings.sections.optimizer import BY_SCHEDULE, SCHEDULE, AdamConfig, LRScheduler
from rollgrad.application.settings.sections.train import ON_STEP, WITH_EMA
from rollgrad.domain.settings import (
    BELOW_ONE,
    COUNT,
    DIRECTORY,
    NOT_NEGATIVE,
    PERIOD,
    SEED,
    SHARE,
    Condition,
    Range,
    SettingMetadata,
    section,
    setting,
)
from rollgrad.domain.splits import SPLIT, SPLIT_HELP


class ExampleFormat(StrEnum):
    """Form of the rows of a dataset."""

    AUTO = "auto"
    """Told by the columns."""
    TOKENS = "tokens"
    """`input_ids`, with `labels` (-100: not trained), `loss_mask`, `completion_mask` or `assistant_masks`."""
    REPLIES = "replies"
    """`prompt_tokens`, `tokens` and `completion`: a reply as `rollgrad generate` writes it."""
    MESSAGES = "messages"
    """`messages`: a conversation."""
    SHAREGPT = "sharegpt"
    """`conversations`: a conversation with `from` and `value`."""
    COMPLETION = "prompt_completion"
    """`prompt` and `completion`, both texts or both messages."""
    ALPACA = "alpaca"
    """`instruction`, `input` and `output`."""
    TEXT = "text"
    """`text`, all of which is trained."""
    PAIRS = "pairs"
    """`chosen` and `rejected`, with or without a `prompt`: texts, replies as messages, or whole conversations; or
    replies with ranks."""
    STEPS = "steps"
    """`prompt`, `completions` and `labels`: the steps of a solution, each with the probability that it is right; or one
    text with a placeholder at each step's end."""
    UNPAIRED = "unpaired"
    """`prompt`, `completion` and `label`, which is true for a good completion and false for a bad one."""


class TrainOn(StrEnum):
    """Tokens that carry loss."""

    ASSISTANT = "assistant"
    """Every reply; of a prompt and a completion the completion."""
    LAST = "last"
    """The last reply."""
    COMPLETION = "completion"
    """The messages after the last user message; of a prompt and a completion the completion."""
    ALL = "all"
    """All tokens but the one that begins the sequence."""


class LongRows(StrEnum):
    """Treatment of rows that are longer than data.max_tokens."""

    DROP = "drop"
    """They are not trained on, and counted."""
    CUT = "cut"
    """Their first data.max_tokens tokens are; no end is put where they are cut."""
    ERROR = "error"
    """They are an error."""


@define(kw_only=True)
class ExampleAdamConfig(AdamConfig):
    """AdamW of a trainer over examples; its peak learning rate has a default of its own for adapters."""

    default_lrs: ClassVar[tuple[float, float]]
    """Default peak learning rate of all weights, and of adapters."""

    lr: float | None = setting(None, "Peak learning rate.", NOT_NEGATIVE)  # type: ignore[assignment] # depends on lora


def with_default_lrs(kind: type[ExampleAdamConfig], fields: Sequence["Attribute[Any]"]) -> list["Attribute[Any]"]:
    """Returns the fields of a subclass, `lr` first, whose text says the default learning rates; for `define`."""
    whole, adapters = (format(Decimal(repr(lr)), "e") for lr in kind.default_lrs)  # 5e-7, where floats write 5e-07
    doc = f"Peak learning rate; default: {whole}, with adapters (lora.rank above 0) {adapters}."
    lr = next(field for field in fields if field.name == "lr")
    documented = lr.evolve(metadata={SettingMetadata: evolve(SettingMetadata.of(lr), doc=doc)})
    return [documented, *(field for field in fields if field is not lr)]


@define(kw_only=True)
class ExampleModelConfig(ModelConfig):
    """A model that learns from examples, and its optimizer."""

    adam: ExampleAdamConfig = section(ExampleAdamConfig, "AdamW.")
    lr_scheduler: LRScheduler = setting(LRScheduler.COSINE_WITH_MIN_LR, SCHEDULE, only_if=BY_SCHEDULE)
    lr_warmup_ratio: float = setting(
        0.03, "Share of the run's optimizer steps spent warming up.", BELOW_ONE, only_if=BY_SCHEDULE
    )
    freeze_visual_encoder: bool = frozen_tower_setting()

    @property
    def peak_lr(self) -> float:
        """Learning rate of AdamW after warm-up: by default, adapters have a higher one."""
        return self.adam.default_lrs[bool(self.lora.rank)] if self.adam.lr is None else self.adam.lr


STREAMED = Condition(lambda here, run: here.stream, "data.stream is off", "turn on --data.stream")


@define(kw_only=True)
class RowsConfig:
    """Rows of datasets, and how they become tokens."""

    dataset: str = setting(
        "",
        "File (.jsonl, .json, .csv, .parquet; .jsonl.gz), pattern of files, folder, or hub name (NAME:CONFIGURATION "
        "where it has several); several separated by commas. Required.",
    )
    probs: tuple[float, ...] | None = setting(None, "Mixing probabilities, one for each dataset; default: concatenate.")
    split: str = setting("train", SPLIT_HELP, SPLIT)
    max_tokens: int = setting(
        4096,
        "Longest example, in tokens; of a conversation whose template rewrites the history, longest branch.",
        Range(lambda tokens: tokens >= 2, "at least 2, for a prompt and a reply"),
    )
    overlong: LongRows = setting(
        LongRows.DROP,
        "What becomes of longer examples: drop them, cut them to their first tokens (nothing is trained to stop "
        "there), or error.",
    )
    max_dropped: float = setting(
        0.05, "Share of rows that may be dropped, for whatever reason; more is an error.", SHARE
    )
    max_samples: int | None = setting(None, "Read at most this many rows.", COUNT)
    apply_chat_template: bool = setting(
        True, "Render texts of prompt and completion with the model's chat template, as rollouts do."
    )
    chat_template: str | None = setting(
        None,
        "Chat template in place of the model's: a Jinja file, or the template itself. It is saved with the trained "
        "model.",
        only_if=WITH_TEMPLATE,
    )
    chat_template_kwargs: dict[str, bool | int | float | str] | None = setting(
        None,
        "Variables for the chat template, such as enable_thinking False: name value name value; the values true and "
        "false are booleans. A row's own chat_template_kwargs win.",
        only_if=WITH_TEMPLATE,
    )
    system_prompt: str | None = setting(
        None,
        "System message put before every conversation that has none, not even in its row's column system.",
        only_if=WITH_TEMPLATE,
    )
    input_template: str | None = setting(
        None, "Text with {} where the prompt goes; only without the chat template.", only_if=WITHOUT_TEMPLATE
    )
    image_key: str | None = setting(
        None,
        "Column with the images of an example: one or a list of paths, data URIs or files' bytes. Marks <image> in the "
        "messages or the prompt say where they stand; without marks they come before the user's first message. Rows "
        "without images are text.",
        only_if=WITH_TEMPLATE,
    )
    fetch_images: FetchImages = fetch_setting()
    num_workers: int = setting(1, "Processes that prepare the data; 1 is the run's own.", COUNT)
    cache_dir: str | None = setting(
        None,
        "Directory where prepared data, and the log-probs of references, are kept for later runs; default: rollgrad in "
        "XDG_CACHE_HOME or ~/.cache.",
        DIRECTORY,
    )
    stream: bool = setting(
        False,
        "Read rows and make tokens of them while training goes on, for data that have no end or are too large to "
        "prepare: without a report of all rows, and with train.max_steps.",
    )
    shuffle_buffer: int = setting(
        10_000, "Rows that are held in memory and shuffled together.", COUNT, only_if=STREAMED
    )


@define(kw_only=True)
class ExampleDataConfig(RowsConfig):
    """The examples, and how they become tokens."""

    format: ExampleFormat = setting(
        ExampleFormat.AUTO,
        "What a row is: tokens (input_ids with labels or a mask), replies (of rollgrad generate), messages, sharegpt "
        "(conversations), prompt_completion, alpaca (instruction, input, output) or text; auto tells it by the "
        "columns.",
    )
    input_key: str | None = setting(
        None,
        "Column with the prompt, the messages or (with data.format text) the text, where it is not the format's own; "
        "a dot leads into a nested column.",
    )
    output_key: str | None = setting(
        None, "Column with the completion of input_key's prompt; default: completion, where rows have one."
    )
    train_on: TrainOn = setting(
        TrainOn.ASSISTANT,
        "Tokens that carry loss: of every assistant message, of the last one, of the completion (what follows the "
        "last user message), or all. The keys train and weight of a message win; with all they may leave nothing out.",
    )


RANKED = Condition(
    lambda here, run: not (here.chosen_key or here.rejected_key),
    "each row is one pair where columns are named",
    "leave --{at}chosen_key and --{at}rejected_key out",
)


class RankedReplies(StrEnum):
    """Pairs that ranked replies to one prompt make."""

    BEST_WORST = "best_worst"
    ALL = "all"


@define(kw_only=True)
class PairDataConfig(RowsConfig):
    """The preference pairs, and how they become tokens. Each row has a chosen and a rejected reply, as texts or
    messages, and a prompt, or else whole conversations; or ranked replies, whose best and worst are the pair. Or rows
    are labelled replies, whose good and bad ones to the same prompt are pairs. `weight` is its weight in the loss."""

    prompt_key: str | None = setting(
        None, "Column with the prompt, a text or messages; default: prompt, where rows have one."
    )
    chosen_key: str | None = setting(None, "Column with the better reply; default: chosen.")
    rejected_key: str | None = setting(None, "Column with the other reply; default: rejected.")
    pairs: RankedReplies = setting(
        RankedReplies.BEST_WORST,
        "Pairs of ranked replies: the best and the worst, or all, each better one with each worse; of labelled replies "
        "to a prompt each good one with one bad one, or all with all. data.max_samples counts pairs then.",
        only_if=RANKED,
    )


@define(kw_only=True)
class LabelDataConfig(PairDataConfig):
    """The labelled replies, and how they become tokens. Each row has a prompt, a completion, as texts or messages, and
    a label: true, or 1, for a good completion, false, or 0, for a bad one. A row of preference pairs is two, of which
    the chosen reply is good and the rejected one bad. `weight` is the weight of a row in the loss."""

    completion_key: str | None = setting(None, "Column with the reply; default: completion.")
    label_key: str | None = setting(None, "Column with the label; default: label.")


@define(kw_only=True)
class StepDataConfig(RowsConfig):
    """The solutions with labelled steps, and how they become tokens. Each row has a prompt, its steps and a label for
    each: true or 1, false or 0, a probability between them, or nothing. Or it has one text, with a placeholder at the
    end of each step. `weight` is the weight of a row in the loss."""

    prompt_key: str | None = setting(None, "Column with the prompt, a text; default: prompt.")
    steps_key: str | None = setting(
        None,
        "Column with the steps, a list of texts; default: completions. With data.placeholder the column of the "
        "text; default: input.",
    )
    labels_key: str | None = setting(None, "Column with the labels of the steps, a list; default: labels.")
    placeholder: str | None = setting(
        None,
        "Text that stands at each step's end in rows that are one text, which the model is trained to judge there.",
    )
    separator: str = setting("\n", "Text after each step.")
    up_to_first_error: bool = setting(False, "Train no label after the first step that is wrong.")


@define(kw_only=True)
class ExampleTrainConfig:
    """Optimizer steps from examples."""

    on_step_path: str | None = setting(None, ON_STEP)
    batch_size: int = setting(128, "Examples per optimizer step, each with all its branches.", COUNT)
    num_epochs: int = setting(1, "Passes over the examples when max_steps is not set.", COUNT)
    max_steps: int | None = setting(None, "Optimizer steps; default: num_epochs passes over the examples.", COUNT)
    max_tokens_per_micro_batch: int = setting(16384, "Token budget of one forward and backward pass.", COUNT)
    seed: int = setting(42, "Seeds the order of the examples.", SEED)
    profile_steps: int = setting(
        0,
        "Number of steps to profile, from the second step that is taken on, also in a continued run. A Chrome trace of"
        " this process and of each process of a model is written to profile/ in output_dir; profiled steps are slower.",
        NOT_NEGATIVE,
    )
    enable_ema: bool = setting(
        False,
        "Keep a moving average of the model's weights, in the CPU's memory; every saved model has it in the "
        "directory ema.",
    )
    ema_beta: float = setting(0.992, "Its decay per optimizer step.", BELOW_ONE, only_if=WITH_EMA)


@define(kw_only=True)
class ExampleEvalConfig:
    """Evaluation on held-out examples, before, during and after training."""

    dataset: str | None = setting(
        None,
        "Held-out examples, in the same forms as data.dataset; several separated by commas are measured together and, "
        "up to 64, each. None turns evaluation off.",
    )
    split: str = setting("test", SPLIT_HELP, SPLIT)
    steps: int = setting(-1, "Steps between evaluations; -1 evaluates only at the start and the end.", PERIOD)
    max_samples: int | None = setting(
        None, "Evaluate at most this many examples, of several datasets about as many of each.", COUNT
    )
