"""The library face of trainers that learn from examples."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.adapters.system.unwritable import remedy
from rollgrad.application.settings.dpo import DPORun, dpo_errors
from rollgrad.application.settings.kd import KDRun, kd_errors
from rollgrad.application.settings.kto import KTORun, kto_errors
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.prm import PRMRun, prm_errors
from rollgrad.application.settings.rm import RMRun, rm_errors
from rollgrad.application.settings.rules.examples import sft_errors
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.errors import CheckpointError, RollgradError, raise_together
from rollgrad.entrypoints.composition.adapters import check_adapters, check_weights, check_writer
from rollgrad.entrypoints.composition.base import BaseContainer
from rollgrad.entrypoints.composition.lifetimes import give, gives_memory_back
from rollgrad.entrypoints.composition.offline.dpo import dpo_container
from rollgrad.entrypoints.composition.offline.kd import kd_container
from rollgrad.entrypoints.composition.offline.kto import kto_container
from rollgrad.entrypoints.composition.offline.preparation import note_repeated
from rollgrad.entrypoints.composition.offline.prm import prm_container
from rollgrad.entrypoints.composition.offline.rm import rm_container
from rollgrad.entrypoints.composition.offline.sft import sft_container
from rollgrad.entrypoints.composition.packages import check_packages
from rollgrad.entrypoints.data_show import show_report
from rollgrad.entrypoints.kinds import settle
from rollgrad.entrypoints.run_directory import alone, check_output
from rollgrad.entrypoints.training import TrainResult, from_anywhere, train_in

Offline = TypeVar("Offline", bound=OfflineRun)

DATA_REPORT_FILE = "data_report.json"


def train_sft(config: SFTRun, **adapters: Any) -> TrainResult:
    """Fine-tunes a model on examples as `config` says.

    Args:
        config: the run; see `rollgrad train sft --help` for every setting.
        adapters: objects that replace those of the configuration, by the name of the container's provider: `policy`,
            `examples`, `eval_examples`, `sink`, `checkpoints`, `clock`, ... `on_step`: a function of the number of each
            finished step, its metrics, and no samples, which does what that of `rollgrad.train` may do.

    Returns:
        What was made. An interruption (Ctrl-C, SIGTERM, ...) ends the run with the model of the last finished step.

    Raises:
        RollgradError: a setting, file or row is wrong; the message says which and how to fix it. What was trained until
            then is saved before.
    """
    _check(config, sft_errors)
    return _train("train_sft", config, sft_container, adapters)


def train_dpo(config: DPORun, **adapters: Any) -> TrainResult:
    """Trains a model on preference pairs as `config` says.

    Args:
        config: the run; see `rollgrad train dpo --help` for every setting.
        adapters: as for `train_sft`.

    Returns:
        What was made, as `train_sft` does.

    Raises:
        RollgradError: as `train_sft`; or the model does not begin as its reference.
    """
    _check(config, dpo_errors)
    return _train("train_dpo", config, dpo_container, adapters)


def train_kto(config: KTORun, **adapters: Any) -> TrainResult:
    """Trains a model on replies that are labelled good or bad, as `config` says.

    Args:
        config: the run; see `rollgrad train kto --help` for every setting.
        adapters: as for `train_sft`.

    Returns:
        What was made, as `train_sft` does.

    Raises:
        RollgradError: as `train_sft`; or the model does not begin as its reference; or a step has one reply alone.
    """
    _check(config, kto_errors)
    return _train("train_kto", config, kto_container, adapters)


def train_prm(config: PRMRun, **adapters: Any) -> TrainResult:
    """Trains a process reward model on labelled steps as `config` says.

    Args:
        config: the run; see `rollgrad train prm --help` for every setting.
        adapters: as for `train_sft`.

    Returns:
        What was made, as `train_sft` does: `model` is a causal language model, with `reward_tokens` in its config.json.

    Raises:
        RollgradError: as `train_sft`; or a reward token is no token of the model's.
    """
    _check(config, prm_errors)
    return _train("train_prm", config, prm_container, adapters)


def train_rm(config: RMRun, **adapters: Any) -> TrainResult:
    """Trains a reward model on preference pairs as `config` says.

    Args:
        config: the run; see `rollgrad train rm --help` for every setting.
        adapters: as for `train_sft`; the model is `reward_model`.

    Returns:
        What was made, as `train_sft` does: `model` is a sequence classifier with one label.

    Raises:
        RollgradError: as `train_sft`.
    """
    _check(config, rm_errors)
    return _train("train_rm", config, rm_container, adapters)


def train_kd(config: KDRun, **adapters: Any) -> TrainResult:
    """Trains a model to predict as its teacher does, on examples, as `config` says.

    Args:
        config: the run; see `rollgrad train kd --help` for every setting.
        adapters: as for `train_sft`.

    Returns:
        What was made, as `train_sft` does.

    Raises:
        RollgradError: as `train_sft`; or the teacher has another vocabulary.
    """
    _check(config, kd_errors)
    return _train("train_kd", config, kd_container, adapters)


@gives_memory_back
def _check(run: Offline, errors: Callable[[Offline], Sequence[RollgradError]]) -> None:
    """Settles what Python assigned, in place, and raises what `errors` finds."""
    settle(run)
    raise_together(errors(run))


def _train(
    function: str, config: Offline, make: Callable[[Offline], BaseContainer], adapters: Mapping[str, Any]
) -> TrainResult:
    check_output(config)
    config = from_anywhere(config)
    container = make(config)
    give(container, adapters, function)
    with alone(config.ckpt):
        return train_in(
            config,
            container,
            title=f"{Path(config.actor.model_name_or_path).name} on {config.data.dataset}",
            check=lambda: _check_models(config),
            before_run=lambda: _report_data(config, container),
        )


def _check_models(config: OfflineRun) -> None:
    """Checks what of the models can be known before the data are read."""
    check_packages(config)
    check_writer(config)
    check_weights(config)
    check_adapters(config)


def _report_data(config: OfflineRun, container: Any) -> None:
    """Writes the report of the data and shows it."""
    sets: dict[str, PreparedExamples] = {"data.dataset": container.examples()}
    if config.eval.dataset is not None:
        sets["eval.dataset"] = container.eval_examples()
        note_repeated(sets["eval.dataset"], sets["data.dataset"])
    reports = {name: examples.report for name, examples in sets.items() if hasattr(examples, "report")}
    text = json.dumps({name: report.to_json() for name, report in reports.items()}, indent=2, ensure_ascii=False)
    path = Path(config.ckpt.output_dir) / DATA_REPORT_FILE
    try:
        replace_file(path, (text + "\n").encode(errors="replace"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror or error}): {remedy(error)}.") from error
    if config.logger.console:
        for name, report in reports.items():
            show_report(name, report)
