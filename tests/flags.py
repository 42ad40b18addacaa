"""The flags of all commands of rollgrad, and words that they take."""

from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from rollgrad.domain.settings import FREE
from rollgrad.entrypoints.cli.chat import ChatArguments
from rollgrad.entrypoints.cli.data import DataShowArguments
from rollgrad.entrypoints.cli.evaluation import EvalArguments
from rollgrad.entrypoints.cli.generation import GenerateArguments, ScoreArguments
from rollgrad.entrypoints.cli.loop import LOOPS
from rollgrad.entrypoints.cli.merge_lora import MergeLoraArguments
from rollgrad.entrypoints.cli.offline import TRAINERS
from rollgrad.entrypoints.cli.parsing import DoctorArguments, TrainArguments, flag_kinds
from rollgrad.entrypoints.cli.replay import ReplayArguments
from rollgrad.entrypoints.cli.rescore import RescoreArguments
from rollgrad.entrypoints.cli.runs import ExportArguments, InspectArguments, ReportArguments
from rollgrad.entrypoints.cli.serve_agent import ServeAgentArguments
from rollgrad.entrypoints.cli.serve_reward import ServeRewardArguments
from rollgrad.entrypoints.cli.serve_tinker import ServeTinkerArguments
from rollgrad.entrypoints.cli.ui import UIArguments

KINDS: tuple[type[Any], ...] = (
    TrainArguments,
    EvalArguments,
    GenerateArguments,
    ScoreArguments,
    DoctorArguments,
    ChatArguments,
    ServeAgentArguments,
    ServeRewardArguments,
    ServeTinkerArguments,
    MergeLoraArguments,
    *(trainer.arguments for trainer in TRAINERS.values()),
    *(loop.arguments for loop in LOOPS.values()),
    DataShowArguments,
    ExportArguments,
    InspectArguments,
    ReportArguments,
    ReplayArguments,
    RescoreArguments,
    UIArguments,
)
EVERY = {name: kind for arguments in reversed(KINDS) for name, kind in flag_kinds(arguments).items()}


def negative(name: str) -> str:
    """The flag that says no: `data.no_apply_chat_template`."""
    section, dot, last = name.rpartition(".")
    return f"{section}{dot}no_{last}"


def example(kind: Any) -> list[str]:
    """Words that a flag of that type takes."""
    if kind == FREE:
        return ["{name: 1}"]
    if isinstance(kind, UnionType):
        return example(next(part for part in get_args(kind) if part is not type(None)))
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        return [word for part in (parts[:1] if parts[-1] is Ellipsis else parts) for word in example(part)]
    if get_origin(kind) is dict:
        return ["name", "1"]
    words = {bool: "True", int: "3", float: "0.5", str: "text", Path: "file"}
    return [words[kind]] if kind in words else [next(iter(kind)).value]
