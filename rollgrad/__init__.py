"""rollgrad: reinforcement learning for language models.

>>> import rollgrad
>>> callable(rollgrad.train)
True
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollgrad.moved import install

# torch reads this at its first tensor: memory of large ones comes in huge pages, whose faults cost a quarter.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

if TYPE_CHECKING:
    from rollgrad.adapters.tools.function import tool as tool
    from rollgrad.application.pipelines.step_callback import StopTraining as StopTraining
    from rollgrad.application.settings.dpo import DPORun as DPORun
    from rollgrad.application.settings.kd import KDRun as KDRun
    from rollgrad.application.settings.kto import KTORun as KTORun
    from rollgrad.application.settings.loop import CSFTRun as CSFTRun
    from rollgrad.application.settings.loop import IterDPORun as IterDPORun
    from rollgrad.application.settings.loop import RSRun as RSRun
    from rollgrad.application.settings.prm import PRMRun as PRMRun
    from rollgrad.application.settings.rm import RMRun as RMRun
    from rollgrad.application.settings.run import RLConfig as RLConfig
    from rollgrad.application.settings.sft import SFTRun as SFTRun
    from rollgrad.domain.algorithms.estimators.registry import estimator as estimator
    from rollgrad.domain.algorithms.losses.contract import policy_loss as policy_loss
    from rollgrad.domain.algorithms.losses.kl import kl_estimator as kl_estimator
    from rollgrad.domain.settings import setting as setting
    from rollgrad.entrypoints.generation import Replies as Replies
    from rollgrad.entrypoints.generation import generate as generate
    from rollgrad.entrypoints.generation import score as score
    from rollgrad.entrypoints.library import TrainResult as TrainResult
    from rollgrad.entrypoints.library import evaluate as evaluate
    from rollgrad.entrypoints.library import load_config as load_config
    from rollgrad.entrypoints.library import train as train
    from rollgrad.entrypoints.loop import LoopResult as LoopResult
    from rollgrad.entrypoints.loop import loop as loop
    from rollgrad.entrypoints.offline import train_dpo as train_dpo
    from rollgrad.entrypoints.offline import train_kd as train_kd
    from rollgrad.entrypoints.offline import train_kto as train_kto
    from rollgrad.entrypoints.offline import train_prm as train_prm
    from rollgrad.entrypoints.offline import train_rm as train_rm
    from rollgrad.entrypoints.offline import train_sft as train_sft
    from rollgrad.entrypoints.ui.notebook import show as show

__version__ = "0.1.0"

_PLACES = {
    "rollgrad.adapters.tools.function": ("tool",),
    "rollgrad.application.pipelines.step_callback": ("StopTraining",),
    "rollgrad.application.settings.dpo": ("DPORun",),
    "rollgrad.application.settings.kd": ("KDRun",),
    "rollgrad.application.settings.kto": ("KTORun",),
    "rollgrad.application.settings.loop": ("CSFTRun", "IterDPORun", "RSRun"),
    "rollgrad.application.settings.prm": ("PRMRun",),
    "rollgrad.application.settings.rm": ("RMRun",),
    "rollgrad.application.settings.run": ("RLConfig",),
    "rollgrad.application.settings.sft": ("SFTRun",),
    "rollgrad.domain.algorithms.estimators.registry": ("estimator",),
    "rollgrad.domain.algorithms.losses.contract": ("policy_loss",),
    "rollgrad.domain.algorithms.losses.kl": ("kl_estimator",),
    "rollgrad.domain.settings": ("setting",),
    "rollgrad.entrypoints.generation": ("Replies", "generate", "score"),
    "rollgrad.entrypoints.library": ("TrainResult", "evaluate", "load_config", "train"),
    "rollgrad.entrypoints.loop": ("LoopResult", "loop"),
    "rollgrad.entrypoints.offline": ("train_dpo", "train_kd", "train_kto", "train_prm", "train_rm", "train_sft"),
    "rollgrad.entrypoints.ui.notebook": ("show",),
}
_PUBLIC = {name: module for module, names in _PLACES.items() for name in names}
__all__ = ["__version__", *_PUBLIC]


install()


def __getattr__(name: str) -> Any:
    """Loads public names on first use, so that `import rollgrad` costs nothing."""
    if name in _PUBLIC:
        found = getattr(import_module(_PUBLIC[name]), name)
        import_module("rollgrad.entrypoints.cli.logs").log_by_default()
        return found
    raise AttributeError(f"module 'rollgrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names those that are not loaded yet, too, for completion in notebooks."""
    return sorted({*globals(), *_PUBLIC})
