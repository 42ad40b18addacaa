"""The section `data`: the prompts."""

from enum import StrEnum

from attrs import define

from rollgrad.application.settings.sections.images import WITH_IMAGES, FetchImages, fetch_setting
from rollgrad.domain.settings import COUNT, INTERVAL, Condition, Range, setting
from rollgrad.domain.splits import SPLIT, SPLIT_HELP


class Overlong(StrEnum):
    """Treatment of prompts that are longer than allowed."""

    DROP = "drop"
    ERROR = "error"


DEFAULT_PROMPT_TOKENS = 1024
"""Longest prompt where neither data.max_prompt_tokens nor data.max_len is set."""


WITH_TEMPLATE = Condition(
    lambda here, run: here.apply_chat_template,
    "data.apply_chat_template is off",
    "turn on --data.apply_chat_template",
)

WITHOUT_TEMPLATE = Condition(
    lambda here, run: not here.apply_chat_template,
    "the chat template is on",
    "turn it off with --data.no_apply_chat_template",
)


@define(kw_only=True)
class DataConfig:
    """The prompts."""

    prompt_dataset: str = setting(
        "",
        "File (.json, .jsonl, .csv, .tsv, .parquet; .jsonl.gz), pattern of files, folder, hub name (NAME:CONFIGURATION "
        "where it has several, such as openai/gsm8k:main), reasoning_gym:TASK; several separated by commas. Required.",
    )
    prompt_probs: tuple[float, ...] | None = setting(
        None, "Mixing probabilities, one for each dataset; default: concatenate."
    )
    prompt_split: str = setting("train", SPLIT_HELP, SPLIT)
    input_key: str | None = setting(
        None,
        "Column with the prompt: text, or a list of chat messages; a dot leads into a nested column. Default: "
        "prompt, question, problem, input or instruction, whichever there is.",
    )
    label_key: str | None = setting(
        None,
        "Column with what the reward compares against; a dot leads into a nested column (reward_model.ground_truth). "
        "Default: verl's reward_model.ground_truth, or else answer, solution, label, ground_truth, final_answer or "
        "target, whichever there is.",
    )
    apply_chat_template: bool = setting(True, "Render prompts with the model's chat template.")
    chat_template: str | None = setting(
        None,
        "Chat template in place of the model's: a Jinja file, or the template itself. It is saved with the trained "
        "model.",
        only_if=WITH_TEMPLATE,
    )
    chat_template_kwargs: dict[str, bool | int | float | str] | None = setting(
        None,
        "Variables for the chat template, such as enable_thinking False: name value name value; the values true and "
        "false are booleans.",
        only_if=WITH_TEMPLATE,
    )
    system_prompt: str | None = setting(
        None,
        "System message put before every prompt that has none, not even in its row's column system.",
        only_if=WITH_TEMPLATE,
    )
    input_template: str | None = setting(
        None,
        "Text with {} where the prompt goes, e.g. 'Question: {}\\nAnswer:'; only without the chat template.",
        only_if=WITHOUT_TEMPLATE,
    )
    prompt_suffix: str | None = setting(
        None,
        "Text behind every prompt's own, in its last user message, before the template renders it: what a model that "
        "was trained by `rollgrad loop csft` is asked for, such as ' <rm_score>: 5.00 '.",
    )
    max_prompt_tokens: int | None = setting(
        None, "Longest prompt, in tokens; default: 1024, or with max_len all but one token of it.", COUNT
    )
    max_len: int | None = setting(
        None,
        "Tokens of prompt and reply together (of the whole history where there are several turns, in each of its "
        "branches): a reply gets what the prompt leaves, up to rollout.max_new_tokens. None bounds each by itself.",
        Range(lambda tokens: tokens >= 2, "at least 2, for a prompt and a reply"),
    )
    overlong: Overlong = setting(
        Overlong.DROP,
        "What becomes of prompts that are longer: drop them before the first step (they are counted and reported), "
        "or error.",
    )
    max_samples: int | None = setting(None, "Read at most this many prompts.", COUNT)
    size: int = setting(1000, "Prompts to generate for a reasoning_gym task.", COUNT)
    image_key: str | None = setting(
        None,
        "Column with the images of a prompt: one or a list of paths, data URIs or files' bytes. Marks <image> in the "
        "prompt's text say where they stand; without marks they come before it. Rows without images are text.",
        only_if=WITH_TEMPLATE,
    )
    fetch_images: FetchImages = fetch_setting()
    max_images_per_prompt: int | None = setting(
        None,
        "Images of a prompt at most: a row with more is an error. None allows any number.",
        COUNT,
        only_if=WITH_IMAGES,
    )
    curriculum_range: tuple[float, float] | None = setting(
        None,
        "Skip prompts whose latest mean score lies outside, but for every eighth time; none plays all alike.",
        INTERVAL,
    )

    @property
    def prompt_limit(self) -> int:
        """Longest prompt that is played, in tokens."""
        if self.max_prompt_tokens is not None:
            return self.max_prompt_tokens
        return DEFAULT_PROMPT_TOKENS if self.max_len is None else self.max_len - 1
