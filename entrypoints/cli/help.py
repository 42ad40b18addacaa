"""`--help` of the commands that read a run's settings (the essential ones, a section, or all), and of those with a few
flags of their own.

Written from the fields of the settings, without torch and tyro, so that it comes at once.
"""

import ast
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import attrs
from attrs import evolve, frozen

from rollgrad.application.settings import loop_rules
from rollgrad.application.settings.rules import examples as example_rules
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import FREE, SettingMetadata
from rollgrad.entrypoints.cli.parsing import with_extension
from rollgrad.entrypoints.names.suggestions import unknown_flag

HELP_FLAGS = ("-h", "--help")
MOST_COLUMNS = 110
ALL = "all"

RUN_EXAMPLE = """  rollgrad train rl --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.prompt_dataset reasoning_gym:basic_arithmetic --algo.preset grpo --ckpt.output_dir runs/first"""

EVAL_EXAMPLE = """  rollgrad eval --actor.model_name_or_path runs/first/model \\
      --eval.dataset reasoning_gym:basic_arithmetic --eval.max_samples 100"""

REWARD = {
    "The reward: one of these": (
        *("reward.function_path", "reward.verifier", "reward.model_name_or_path", "reward.remote_url"),
    )
}

RUN_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path", "actor.dtype", "actor.lora.rank"),
    "The prompts": ("data.prompt_dataset", "data.input_key", "data.label_key", "data.apply_chat_template"),
    **REWARD,
    "The algorithm": ("algo.preset", "algo.advantage.estimator", "algo.kl.init_coef", "actor.adam.lr"),
    "Rollouts": (
        *("rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.max_new_tokens", "rollout.temperature"),
        "rollout.engine",
    ),
    "Training": ("train.max_steps", "train.batch_size", "train.seed"),
    "Evaluation": ("eval.dataset", "eval.steps"),
    "Output": ("ckpt.output_dir", "ckpt.save_steps", "ckpt.resume"),
}
"""Settings that a newcomer needs, by topic."""

EVAL_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path", "actor.dtype"),
    "The prompts": ("eval.dataset", "eval.split", "eval.max_samples", "data.input_key", "data.label_key"),
    **REWARD,
    "Replies": (
        *("eval.temperature", "eval.top_p", "eval.top_k", "eval.n_samples_per_prompt", "eval.max_new_tokens"),
        "rollout.engine",
    ),
}

SFT_EXAMPLE = """  rollgrad train sft --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset conversations.jsonl --ckpt.output_dir runs/sft"""

EXAMPLES: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path",),
    "The examples": ("data.dataset", "data.format", "data.train_on", "data.max_tokens", "data.overlong"),
}

OFFLINE: Mapping[str, Sequence[str]] = {
    "The optimizer": ("actor.adam.lr", "actor.lora.rank"),
    "Training": ("train.batch_size", "train.num_epochs", "train.max_steps", "train.seed"),
    "Evaluation": ("eval.dataset", "eval.steps"),
    "Output": ("ckpt.output_dir", "ckpt.save_steps", "ckpt.resume"),
}
"""Topics of all trainers over examples."""

SFT_ESSENTIALS: Mapping[str, Sequence[str]] = {
    **EXAMPLES,
    **OFFLINE,
    "The optimizer": (*OFFLINE["The optimizer"], "train.loss"),
}

DPO_EXAMPLE = """  rollgrad train dpo --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset pairs.jsonl --ckpt.output_dir runs/dpo"""

DPO_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path", "ref.model_name_or_path"),
    "The pairs": ("data.dataset", "data.prompt_key", "data.chosen_key", "data.rejected_key", "data.max_tokens"),
    "The loss": ("dpo.loss", "dpo.beta", "dpo.label_smoothing"),
    **OFFLINE,
}

KTO_EXAMPLE = """  rollgrad train kto --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset labelled.jsonl --ckpt.output_dir runs/kto"""

KTO_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path", "ref.model_name_or_path"),
    "The replies": ("data.dataset", "data.prompt_key", "data.completion_key", "data.label_key", "data.max_tokens"),
    "The loss": ("kto.loss", "kto.beta", "kto.balance"),
    **OFFLINE,
}

RM_EXAMPLE = """  rollgrad train rm --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset pairs.jsonl --eval.dataset held_out_pairs.jsonl --ckpt.output_dir runs/rm"""

RM_ESSENTIALS: Mapping[str, Sequence[str]] = {
    **DPO_ESSENTIALS,
    "The model": ("actor.model_name_or_path",),
    "The loss": ("rm.margin", "rm.centring"),
}

KD_EXAMPLE = """  rollgrad train kd --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --teacher.model_name_or_path HuggingFaceTB/SmolLM2-360M-Instruct \\
      --data.dataset conversations.jsonl --ckpt.output_dir runs/kd"""

KD_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The models": ("actor.model_name_or_path", "teacher.model_name_or_path"),
    "The examples": EXAMPLES["The examples"],
    "The loss": ("kd.weight", "kd.beta", "kd.temperature", "kd.top_k", "kd.cache"),
    **OFFLINE,
}

PRM_EXAMPLE = """  rollgrad train prm --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset labelled_steps.jsonl --ckpt.output_dir runs/prm"""

PRM_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path",),
    "The steps": ("data.dataset", "data.placeholder", "data.separator", "data.up_to_first_error", "data.max_tokens"),
    "The loss": ("prm.reward_tokens",),
    **OFFLINE,
}

DATA_EXAMPLE = """  rollgrad data show --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.dataset conversations.jsonl --n 5"""

GENERATE_EXAMPLE = """  rollgrad generate --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.prompt_dataset reasoning_gym:basic_arithmetic --rollout.n_samples_per_prompt 8 --output replies.jsonl"""

GENERATE_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path", "actor.dtype"),
    "The prompts": ("data.prompt_dataset", "data.prompt_split", "data.input_key", "data.max_samples"),
    "Replies": (
        *("rollout.n_samples_per_prompt", "rollout.max_new_tokens", "rollout.temperature", "rollout.top_p"),
        *("rollout.engine", "train.seed"),
    ),
}

REPLAY_EXAMPLE = """  rollgrad replay runs/first --step 1"""
REPLAY_ESSENTIALS: Mapping[str, Sequence[str]] = {}
RESCORE_EXAMPLE = """  rollgrad rescore runs/first --reward.function_path reward.py"""
SCORE_EXAMPLE = """  rollgrad score --input replies.jsonl --reward.verifier last_number --output scored.jsonl"""

SCORE_ESSENTIALS: Mapping[str, Sequence[str]] = {
    **REWARD,
    "The tokenizer": ("actor.model_name_or_path",),
}

LOOP_EXAMPLE = """  rollgrad loop {} --actor.model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
      --data.prompt_dataset reasoning_gym:basic_arithmetic --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 \\
      --ckpt.output_dir runs/{}"""

LOOP_ESSENTIALS: Mapping[str, Sequence[str]] = {
    "The model": ("actor.model_name_or_path",),
    "The prompts": ("data.prompt_dataset", "data.input_key", "data.label_key"),
    **REWARD,
    "Replies": (
        *("rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.max_new_tokens", "rollout.temperature"),
        "rollout.engine",
    ),
    "Training": ("actor.adam.lr", "actor.lora.rank", "train.batch_size", "train.num_epochs", "train.seed"),
    "Evaluation": ("eval.dataset", "eval.max_samples"),
    "Output": ("ckpt.output_dir",),
}
RS_ESSENTIALS = {"The loop": ("loop.iterations", "loop.top_k", "loop.min_reward", "loop.min_margin"), **LOOP_ESSENTIALS}
ITER_DPO_ESSENTIALS = {
    "The loop": ("loop.iterations", "loop.min_margin", "loop.reference"),
    **LOOP_ESSENTIALS,
    "The loss": ("dpo.loss", "dpo.beta"),
}
CSFT_ESSENTIALS = {
    "The loop": ("loop.iterations", "loop.suffix", "loop.normalize", "loop.target"),
    **LOOP_ESSENTIALS,
}

ESSENTIALS = {
    "train rl": (RUN_EXAMPLE, RUN_ESSENTIALS),
    "eval": (EVAL_EXAMPLE, EVAL_ESSENTIALS),
    "generate": (GENERATE_EXAMPLE, GENERATE_ESSENTIALS),
    "score": (SCORE_EXAMPLE, SCORE_ESSENTIALS),
    "replay": (REPLAY_EXAMPLE, REPLAY_ESSENTIALS),
    "rescore": (RESCORE_EXAMPLE, SCORE_ESSENTIALS),
    "loop rs": (LOOP_EXAMPLE.format("rs", "rs"), RS_ESSENTIALS),
    "loop iter_dpo": (LOOP_EXAMPLE.format("iter_dpo", "iter_dpo"), ITER_DPO_ESSENTIALS),
    "loop csft": (LOOP_EXAMPLE.format("csft", "csft"), CSFT_ESSENTIALS),
    "train sft": (SFT_EXAMPLE, SFT_ESSENTIALS),
    "train dpo": (DPO_EXAMPLE, DPO_ESSENTIALS),
    "train kto": (KTO_EXAMPLE, KTO_ESSENTIALS),
    "train prm": (PRM_EXAMPLE, PRM_ESSENTIALS),
    "train rm": (RM_EXAMPLE, RM_ESSENTIALS),
    "train kd": (KD_EXAMPLE, KD_ESSENTIALS),
    "data show": (DATA_EXAMPLE, EXAMPLES),
}
"""The example and the essential settings of each command that reads the settings of a run."""

PLACES: Mapping[str, str] = {
    **dict.fromkeys(("replay", "rescore", "inspect", "report"), "RUN "),
    "export": "pairs|sft|messages RUN ",
    "ui": "[DIR] ",
    "eval": "[MODEL ...] ",
}
"""Words that a command takes without a flag, with a space behind them."""

OF_EXAMPLES = ("train sft", "train dpo", "train kto", "train kd", "train rm", "train prm", "data show")


@frozen
class Setting:
    """A setting of a command: its dotted name, type, default and docstring."""

    name: str
    kind: Any
    default: Any
    doc: str


@frozen
class Section:
    """A section of settings, its docstring, and those of its settings that stand in no section within it."""

    name: str
    doc: str
    settings: tuple[Setting, ...]


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Returns whether one of the words is --help."""
    return any(word.partition("=")[0] in HELP_FLAGS for word in arguments)


def show_help(command: str, kind: type[attrs.AttrsInstance], arguments: Sequence[str]) -> int:
    """Prints what follows --help: a section, a setting, all; the essential settings where nothing does.

    Raises:
        ConfigurationError: there is no such section.
    """
    sections = list(_sections(with_extension(kind, arguments)(), ""))
    unread = example_rules.UNREAD if command in OF_EXAMPLES else loop_rules.UNREAD
    hidden = unread if command in OF_EXAMPLES or command.startswith("loop ") else ()
    sections = [evolve(its, settings=tuple(s for s in its.settings if s.name not in hidden)) for its in sections]
    topic = _topic(arguments)
    if topic is None:
        lines = _essentials(command, kind, sections)
    elif topic == ALL:
        lines = [line for section in sections for line in (*_section(section), "")]
    else:
        lines = _about(topic, command, sections)
    sys.stdout.write("\n".join(line.rstrip() for line in lines).rstrip() + "\n")
    return 0


def show_flags(command: str, kind: type[attrs.AttrsInstance]) -> int:
    """Prints the --help of a command whose flags are the fields of `kind`, with a docstring below each."""
    docs = {name: doc for base in reversed(kind.__mro__[:-1]) for name, doc in _field_docs(base).items()}
    lines = [f"usage: rollgrad {command} {PLACES.get(command, '')}[OPTIONS]"]
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        lines += ["", *_wrapped(paragraph, "")]
    lines.append("")
    for field in attrs.fields(kind):
        lines += _setting(Setting(field.name, field.type, field.default, docs[field.name]), brief=False)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _field_docs(kind: type) -> dict[str, str]:
    """Returns the docstrings that stand below the fields of a class, by their names."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _topic(arguments: Sequence[str]) -> str | None:
    index = next(index for index, word in enumerate(arguments) if word.partition("=")[0] in HELP_FLAGS)
    _, equals, value = arguments[index].partition("=")
    following = value if equals else next(iter(arguments[index + 1 :]), "")
    return following.lstrip("-").replace("-", "_") or None


def _essentials(command: str, kind: type[attrs.AttrsInstance], sections: Sequence[Section]) -> list[str]:
    settings = {setting.name: setting for section in sections for setting in section.settings}
    example, groups = ESSENTIALS[command]
    own = [setting for setting in settings.values() if "." not in setting.name]
    lines = [
        f"usage: rollgrad {command} {PLACES.get(command, '')}[--config FILE.yaml] [--SECTION.SETTING VALUE ...]",
        "",
        *_wrapped(inspect.cleandoc(kind.__doc__ or "").replace(" below", ""), ""),
        "",
        example,
        "",
        *(line for setting in own for line in _setting(setting, brief=True)),
    ]
    for title, names in groups.items():
        lines += ["", title]
        lines += [line for name in names for line in _setting(settings[name], brief=True)]
    lines += ["", f"Sections: rollgrad {command} --help SECTION shows one, --help all shows all"]
    outer = [section for section in sections if section.name and "." not in section.name]
    return lines + [f"  {section.name:<10}{_first_sentence(section.doc)}" for section in outer]


def _about(topic: str, command: str, sections: Sequence[Section]) -> list[str]:
    within = [section for section in sections if f"{section.name}.".startswith(f"{topic}.")]
    if within:
        return [line for section in within for line in (*_section(section), "")]
    settings = [setting for section in sections for setting in section.settings]
    found = next((setting for setting in settings if setting.name == topic), None)
    if found is not None:
        return list(_setting(found, brief=False))
    names = [section.name for section in sections if section.name and "." not in section.name]
    hint = unknown_flag(f"--{topic}", [setting.name for setting in settings], command).partition("; ")[2]
    more = f" As a setting: {hint}" if "--help" not in hint else ""
    raise ConfigurationError(
        f"{topic!r} is neither a section nor a setting: the sections are {', '.join(names)}, and all.{more}"
    )


def _section(section: Section) -> Iterator[str]:
    yield f"{section.name}: {section.doc}" if section.name else "Of the command itself"
    for setting in section.settings:
        yield from _setting(setting, brief=False)


def _setting(setting: Setting, *, brief: bool) -> Iterator[str]:
    yield f"  --{setting.name} {_value(setting.kind)}{_default(setting)}"
    yield from _wrapped(_first_sentence(setting.doc) if brief else setting.doc, "      ")


def _sections(config: Any, prefix: str, doc: str = "") -> Iterator[Section]:
    """Yields the sections of a configuration, those within a section after it."""
    kind: Any = type(config)
    settings, inner = [], []
    for field in attrs.fields(kind):
        name, value, its_doc = f"{prefix}{field.name}", getattr(config, field.name), SettingMetadata.of(field).doc
        if attrs.has(field.type):
            inner.append((value, f"{name}.", its_doc))
        else:
            settings.append(Setting(name, field.type, value, its_doc))
    yield Section(prefix.rstrip("."), doc, tuple(settings))
    for value, deeper, its_doc in inner:
        yield from _sections(value, deeper, its_doc)


def _value(kind: Any) -> str:
    """Returns the placeholder of a value of that type, after its flag."""
    if kind == FREE:
        return "SECTION"
    if isinstance(kind, UnionType):
        return " | ".join(_value(part) for part in get_args(kind) if part is not NoneType)
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        return f"{_value(parts[0])} ..." if parts[-1] is Ellipsis else " ".join(map(_value, parts))
    if get_origin(kind) is dict:
        return "NAME NUMBER ..." if parts[1] is float else "NAME VALUE ..."
    if issubclass(kind, StrEnum):
        return "{" + ",".join(kind) + "}"
    return _VALUES.get(kind) or str(kind.__name__).upper()


_VALUES: Mapping[Any, str] = {bool: "[True|False]", int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def _default(setting: Setting) -> str:
    default = setting.default
    if default in ("", None, ()):
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f" (default: {shown if shown.isprintable() else repr(shown)})"


def _first_sentence(doc: str) -> str:
    """Returns a docstring up to the first full stop that ends a sentence, which no decimal point, no file name
    and no "et al." does."""
    return re.split(r"(?<!\bal)\. ", doc)[0].rstrip(".") + "."


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
    return textwrap.wrap(text, max(width, 40), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
