"""The examples that offline trainers learn from: the section `data` of `train sft`, and the words of its settings."""

from enum import StrEnum

from attrs import define


class ExampleFormat(StrEnum):
    """What the rows of a data set are."""

    AUTO = "auto"
    """Told by the columns."""
    TOKENS = "tokens"
    """`input_ids`, with `labels` (-100: not trained), `loss_mask`, `completion_mask` or `assistant_masks`."""
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


class TrainOn(StrEnum):
    """Which tokens carry loss."""

    ASSISTANT = "assistant"
    """Every reply; of a prompt and a completion the completion."""
    LAST = "last"
    """The last reply."""
    COMPLETION = "completion"
    """What follows the last user message; of a prompt and a completion the completion."""
    ALL = "all"
    """All tokens but the one that begins the sequence."""


class LongRows(StrEnum):
    """What becomes of rows that are longer than data.max_tokens."""

    DROP = "drop"
    """They are not trained on, and counted."""
    CUT = "cut"
    """Their first data.max_tokens tokens are; no end is put where they are cut."""
    ERROR = "error"
    """They are an error."""


@define(kw_only=True)
class ExampleDataConfig:
    """The examples, and how they become tokens."""

    dataset: str = ""
    """File (.jsonl, .json, .csv, .parquet), saved dataset folder, or hub name (NAME:CONFIGURATION where it has
    several); several separated by commas. Required."""
    probs: tuple[float, ...] | None = None
    """Mixing probabilities, one for each dataset; default: concatenate."""
    split: str = "train"
    """Split to read."""
    format: ExampleFormat = ExampleFormat.AUTO
    """What a row is: tokens (input_ids with labels or a mask), messages, sharegpt (conversations), prompt_completion,
    alpaca (instruction, input, output) or text; auto tells it by the columns."""
    input_key: str | None = None
    """Column with the prompt, the messages or the text, where it is not the format's own; a dot leads into a nested
    column."""
    output_key: str | None = None
    """Column with the completion of input_key's prompt."""
    train_on: TrainOn = TrainOn.ASSISTANT
    """Tokens that carry loss: of every assistant message, of the last one, of the completion (what follows the last
    user message), or all. The keys train and weight of a message win."""
    max_tokens: int = 4096
    """Longest example, in tokens; of a conversation whose template rewrites the history each branch."""
    overlong: LongRows = LongRows.DROP
    """What becomes of longer examples: drop them, cut them to their first tokens (nothing is trained to stop there), or
    error."""
    max_dropped: float = 0.05
    """Share of rows that may be dropped, for whatever reason; more is an error."""
    max_samples: int | None = None
    """Read at most this many rows."""
    apply_chat_template: bool = True
    """Render texts of prompt and completion with the model's chat template, as rollouts do."""
    chat_template: str | None = None
    """Chat template in place of the model's: a Jinja file, or the template itself. It is saved with the trained
    model."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables for the chat template, such as enable_thinking False: name value name value; the values true and false
    are booleans. A row's own chat_template_kwargs win."""
    system_prompt: str | None = None
    """System message put before every conversation that has none."""
    input_template: str | None = None
    """Text with {} where the prompt goes; only without the chat template."""
    num_workers: int = 1
    """Processes that prepare the data; 1 is the run's own."""
    cache_dir: str | None = None
    """Directory where prepared data are kept for later runs; default: ~/.cache/rollgrad, or below XDG_CACHE_HOME."""
