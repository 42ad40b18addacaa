"""The memory plan of a run over examples, for `--dry_run`."""

from functools import partial

from attrs import evolve
from rich.console import Console

from rollgrad.application.settings.example_plan import as_sampling_nothing
from rollgrad.application.settings.kd import KDRun
from rollgrad.application.settings.model_shape import ModelShape
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.prm import PRMRun
from rollgrad.application.settings.rm import RMRun
from rollgrad.entrypoints.dry_run import show_plan


def show_example_plan(run: OfflineRun, console: Console, *, longest: int) -> list[str]:
    """Prints the memory plan of a run whose settings hold, and whose longest example has `longest` tokens; returns a
    sentence for each place where it does not fit.

    Raises:
        CheckpointError: a model cannot be found.
        ConfigurationError: a model cannot be divided as the settings say.
    """
    config = as_sampling_nothing(run, longest=longest)
    sentences = show_plan(config, console, samples=False, becomes=partial(_as_trained, run))
    if isinstance(run, KDRun) and not (run.kd.cache or run.kd.spans):
        console.print("reference: the teacher")
    return sentences


def _as_trained(run: OfflineRun, shape: ModelShape) -> ModelShape:
    if isinstance(run, RMRun):
        return shape.without_head()
    return evolve(shape, compares=isinstance(run, PRMRun))
