"""`rollgrad train sft`, `train dpo` and the other trainers over examples: their flags, and what a command does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, frozen

from rollgrad.application.settings.dpo import DPORun, dpo_errors
from rollgrad.application.settings.kd import KDRun, kd_errors
from rollgrad.application.settings.kto import KTORun, kto_errors
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.prm import PRMRun, prm_errors
from rollgrad.application.settings.rm import RMRun, rm_errors
from rollgrad.application.settings.rules.examples import sft_errors
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.errors import ConfigurationError, RollgradError
from rollgrad.domain.settings import setting
from rollgrad.entrypoints.cli.parsing import TrainFlags, parse_run


@define(kw_only=True, slots=False)
class ExampleFlags(TrainFlags):
    """Flags of commands that train on examples."""

    dry_run: bool = setting(
        False,
        "Check all that the run would refuse before its first step: settings, files, data and memory; show the memory "
        "plan, the counts, a row, the report of the data and the settings that differ from the defaults, and leave.",
    )


@define(kw_only=True)
class SFTArguments(ExampleFlags, SFTRun):
    """Fine-tunes a model on conversations, prompts with completions, or texts. Every setting below is also a key of the
    YAML file."""


@define(kw_only=True)
class DPOArguments(ExampleFlags, DPORun):
    """Trains a model on preference pairs, by DPO or another loss of pairs. Every setting below is also a key of the
    YAML file."""


@define(kw_only=True)
class KTOArguments(ExampleFlags, KTORun):
    """Trains a model on replies that are labelled good or bad, by KTO. Every setting below is also a key of the YAML
    file."""


@define(kw_only=True)
class RMArguments(ExampleFlags, RMRun):
    """Trains a reward model on preference pairs. It is saved as a sequence classifier with one label, which rollgrad
    train rl, rollgrad serve reward and other programs load. Every setting below is also a key of the YAML file."""


@define(kw_only=True)
class KDArguments(ExampleFlags, KDRun):
    """Trains a model to predict as a larger one, its teacher, does. Every setting below is also a key of the YAML
    file."""


@define(kw_only=True)
class PRMArguments(ExampleFlags, PRMRun):
    """Trains a process reward model on solutions whose steps are labelled right or wrong. Every setting below is also a
    key of the YAML file."""


@frozen
class Trainer:
    """A trainer over examples: `rollgrad train NAME`, and `entrypoints.offline.train_NAME`."""

    purpose: str
    arguments: type[ExampleFlags]
    run: type[OfflineRun]
    errors: Callable[[Any], list[ConfigurationError]]
    """Returns every rule that the settings of a `run` break."""


TRAINERS: Mapping[str, Trainer] = {
    "sft": Trainer("fine-tune a model on conversations and texts", SFTArguments, SFTRun, sft_errors),
    "dpo": Trainer("train a model on preference pairs", DPOArguments, DPORun, dpo_errors),
    "kto": Trainer("train a model on replies labelled good or bad", KTOArguments, KTORun, kto_errors),
    "prm": Trainer("train a process reward model on labelled steps", PRMArguments, PRMRun, prm_errors),
    "rm": Trainer("train a reward model on preference pairs", RMArguments, RMRun, rm_errors),
    "kd": Trainer("train a model to predict as its teacher does", KDArguments, KDRun, kd_errors),
}
"""By name."""


def parse_offline(name: str, arguments: Sequence[str]) -> tuple[ExampleFlags, OfflineRun, list[RollgradError]]:
    """Returns flags, settings, and all that is wrong with them.

    Raises:
        ConfigurationError: a flag or its value is wrong, or the file is none.
    """
    trainer = TRAINERS[name]
    parsed, run, unread = parse_run(trainer.arguments, trainer.run, f"train {name}", arguments)
    return parsed, run, [*unread, *trainer.errors(run)]
