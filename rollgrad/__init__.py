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

_PUBLIC = {
    "train": "rollgrad.entrypoints.library",
    "evaluate": "rollgrad.entrypoints.library",
    "generate": "rollgrad.entrypoints.generation",
    "score": "rollgrad.entrypoints.generation",
    "loop": "rollgrad.entrypoints.loop",
    "LoopResult": "rollgrad.entrypoints.loop",
    "RSRun": "rollgrad.application.settings.loop",
    "IterDPORun": "rollgrad.application.settings.loop",
    "CSFTRun": "rollgrad.application.settings.loop",
    "Replies": "rollgrad.entrypoints.generation",
    "load_config": "rollgrad.entrypoints.library",
    "RLConfig": "rollgrad.application.settings.run",
    "SFTRun": "rollgrad.application.settings.sft",
    "train_sft": "rollgrad.entrypoints.offline",
    "DPORun": "rollgrad.application.settings.dpo",
    "train_dpo": "rollgrad.entrypoints.offline",
    "KDRun": "rollgrad.application.settings.kd",
    "train_kd": "rollgrad.entrypoints.offline",
    "KTORun": "rollgrad.application.settings.kto",
    "train_kto": "rollgrad.entrypoints.offline",
    "PRMRun": "rollgrad.application.settings.prm",
    "train_prm": "rollgrad.entrypoints.offline",
    "RMRun": "rollgrad.application.settings.rm",
    "train_rm": "rollgrad.entrypoints.offline",
    "TrainResult": "rollgrad.entrypoints.library",
    "show": "rollgrad.entrypoints.ui.notebook",
    "estimator": "rollgrad.domain.algorithms.estimators.registry",
    "policy_loss": "rollgrad.domain.algorithms.losses.contract",
    "setting": "rollgrad.domain.settings",
    "StopTraining": "rollgrad.application.pipelines.step_callback",
    "tool": "rollgrad.adapters.tools.function",
}
__all__ = [
    "CSFTRun",
    "DPORun",
    "IterDPORun",
    "KDRun",
    "KTORun",
    "LoopResult",
    "PRMRun",
    "RLConfig",
    "RMRun",
    "RSRun",
    "Replies",
    "SFTRun",
    "TrainResult",
    "__version__",
    "estimator",
    "evaluate",
    "generate",
    "load_config",
    "loop",
    "policy_loss",
    "score",
    "setting",
    "show",
    "tool",
    "train",
    "train_dpo",
    "train_kd",
    "train_kto",
    "train_prm",
    "train_rm",
    "train_sft",
]


install()


def __getattr__(name: str) -> Any:
    """Loads public names on first use, so that `import rollgrad` costs nothing."""
    if name in _PUBLIC:
        found = getattr(import_module(_PUBLIC[name]), name)
        import_module("rollgrad.entrypoints.cli.logs").log_by_default()
        return found
    raise AttributeError(f"module 'rollgrad' has no attribute {name!r}")
