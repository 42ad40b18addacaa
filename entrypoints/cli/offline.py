"""`rollgrad train sft`, `train dpo` and the other trainers over examples: their flags, and what a command does."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, frozen

from rollgrad.application.settings.dpo import DPORun, dpo_errors
from rollgrad.application.settings.kd import KDRun, kd_errors
from rollgrad.application.settings.kto import KTORun, kto_errors
from rollgrad.application.settings.offline import OfflineRun, ReferencedRun
from rollgrad.application.settings.prm import PRMRun, prm_errors
from rollgrad.application.settings.rm import RMRun, rm_errors
from rollgrad.application.settings.rules.examples import sft_errors
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.errors import ConfigurationError, RollgradError, raise_together
from rollgrad.domain.settings import setting
from rollgrad.entrypoints.cli.parsing import TrainFlags, parse_run


@define(kw_only=True, slots=False)
class ExampleFlags(TrainFlags):
    """Flags of commands that train on examples."""

    dry_run: bool = setting(
        False,
        "Check all that the run would refuse before its first step: settings, files, data and memory; show the "
        "settings, the report of the data, a row and the memory plan, and leave.",
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


def rehearse_offline(run: OfflineRun, errors: Sequence[RollgradError]) -> None:
    """`--dry_run`: prepares the data, held-out ones too, shows their reports, a row and the memory plan, and says all
    that is wrong.

    Raises:
        RollgradError: settings, files or data are wrong.
    """
    from rich.console import Console

    from rollgrad.entrypoints.composition.outputs import load_on_step, load_trackers
    from rollgrad.entrypoints.composition.packages import check_packages
    from rollgrad.entrypoints.config_io import dump_config
    from rollgrad.entrypoints.data_show import show_held_out, show_rows
    from rollgrad.entrypoints.dry_run import example_file_problems
    from rollgrad.entrypoints.example_plan import show_example_plan

    sys.stdout.write(dump_config(run))
    if run.actor.adam.lr is None:
        sys.stdout.write(f"# actor.adam.lr: {run.actor.peak_lr:g} by default\n")
    raise_together([*errors, *example_file_problems(run)])
    check_packages(run)
    load_on_step(run.train.on_step_path)
    load_trackers(run.logger.report_to)
    problems: list[RollgradError] = []
    examples = show_rows(run, count=1)
    show_held_out(run, examples)
    console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
    longest = run.data.max_tokens if run.data.stream else examples.report.lengths["p100"]
    for sentence in show_example_plan(run, console, longest=longest):
        if run.cluster.address is None:
            problems.append(ConfigurationError(sentence))
        else:  # the cluster's machines are not this one
            console.print(sentence)
    if isinstance(run, ReferencedRun):
        from rollgrad.entrypoints.composition.chat import make_tokenizer
        from rollgrad.entrypoints.composition.reference import check_reference

        check_reference(run, make_tokenizer(run.actor, run.data))
    if isinstance(run, KTORun):
        from rollgrad.entrypoints.composition.kto import check_labels

        check_labels(run, examples)
    if isinstance(run, KDRun):
        from rollgrad.entrypoints.composition.chat import make_tokenizer
        from rollgrad.entrypoints.composition.kd import check_teacher

        check_teacher(run, make_tokenizer(run.actor, run.data))
    if isinstance(run, RMRun):
        from rollgrad.entrypoints.composition.rm import make_compared

        make_compared(run, examples, "data.dataset")
    if isinstance(run, PRMRun):
        from rollgrad.entrypoints.composition.chat import make_tokenizer
        from rollgrad.entrypoints.composition.prm import reward_token_ids

        reward_token_ids(run.prm.reward_tokens, make_tokenizer(run.actor, run.data))
    raise_together(problems)
