"""`rollgrad train sft`: supervised fine-tuning."""

from attrs import define

from rollgrad.application.settings.sft import SFTRun
from rollgrad.entrypoints.cli.parsing import TrainFlags


@define(kw_only=True)
class SFTArguments(TrainFlags, SFTRun):
    """Fine-tunes a model on conversations, prompts with completions, or texts. Every setting below is also a key of the
    YAML file."""
