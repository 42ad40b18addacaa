"""Translates TRL's commands (`trl sft`, `dpo`, `kto`, `reward`, `grpo`, `rloo`, `distillation`) to rollgrad's settings.

Flags with a counterpart of the same meaning, and those without one, are in `names.names_of_trl_commands`. TRL's
defaults are applied where results depend on them. Importable without torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.kto import KTORun
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.rm import RMRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.logger import TRACKERS
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.config_io import structure_run
from rollgrad.entrypoints.names.flags import Program
from rollgrad.entrypoints.names.names_of_trl_commands import COMMANDS, NOTHING, UPLOADED
from rollgrad.entrypoints.names.suggestions import OTHER_COMMANDS
from rollgrad.entrypoints.translation.draft import Draft, TranslatedRun
from rollgrad.entrypoints.translation.schedules import SCHEDULERS
from rollgrad.entrypoints.translation.words import Given, options, parse
from rollgrad.entrypoints.trl.distillation import finish_distillation
from rollgrad.entrypoints.trl.examples import finish_dpo, finish_kto, finish_reward, finish_sft
from rollgrad.entrypoints.trl.grpo import finish_grpo
from rollgrad.entrypoints.trl.launch import launched
from rollgrad.entrypoints.trl.rloo import finish_rloo
from rollgrad.entrypoints.trl.rollouts import count_rollouts

USAGE = """usage: rollgrad trl [--run] COMMAND --flag value ...

Translates a command of TRL (trl sft, dpo, kto, reward, grpo, rloo or distillation, or python, accelerate launch,
torchrun or deepspeed with one of TRL's own scripts, such as trl/scripts/dpo.py) to settings of rollgrad train sft, dpo,
kto, rm or rl, and prints those that differ from the defaults as YAML. What has no counterpart, or not the same one, is
listed on stderr. A file of --config is read as TRL does.

  --run   train instead of printing
"""

LORA_DROPOUT = 0.05
"""TRL's default share of the inputs of adapters that training leaves out."""

RUNS: Mapping[str, tuple[str, type[OfflineRun | RLConfig]]] = {
    "sft": ("train sft", SFTRun),
    "dpo": ("train dpo", DPORun),
    "kto": ("train kto", KTORun),
    "reward": ("train rm", RMRun),
    **dict.fromkeys(("grpo", "rloo", "distillation"), ("train rl", RLConfig)),
}
"""Our command, and the class of its settings, by TRL's command."""


FLOORS = {"cosine_with_min_lr": ("min_lr_rate", "min_lr"), "warmup_stable_decay": ("min_lr_ratio",)}
"""Names of the floor of a schedule in `lr_scheduler_kwargs`: a share of the rate, but `min_lr` a rate."""

COUNTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes"),
    *("num_generations", "steps_per_generation", "generation_batch_size", "num_iterations"),
)
"""Flags that are at least 1."""


def translate_command(argv: Sequence[str]) -> TranslatedRun:
    """Returns the run of a command of TRL, with notes.

    Raises:
        ConfigurationError: there is no such command, flag or value, or its file cannot be read.
    """
    words, script = launched(argv[1:] if argv[:1] == ["trl"] else argv)
    if not words or words[0] not in COMMANDS:
        given = words[0] if words else "nothing"
        ours = OTHER_COMMANDS.get(given.replace("-", "_"), f"write rollgrad trl with one of {', '.join(COMMANDS)}.")
        raise ConfigurationError(f"{given} is no command of TRL that is translated: {ours}")
    name, program = words[0], COMMANDS[words[0]]
    flags, lost = _with_file(parse(words[1:]), program)
    draft = Draft(program=program, options=options(program, flags), lost=lost)
    _check(draft)
    if script is not None:
        draft.lost.append(f"{script}: its flags alone are read, not what else the script does with data and rewards")
    for flag in dict.fromkeys((*draft.options, *program.flags)):
        if str(draft.value(flag)) not in ("None", "none", "null"):
            draft.follow(flag)
    _model(draft)
    _optimizer(draft)
    command, run = RUNS[name]
    _length(draft, epochs="train.num_episodes" if run is RLConfig else "train.num_epochs")
    _output(draft)
    finish = FINISH[name]
    finish(draft)
    if name != "distillation":  # distillation measures the divergence, and has no reward to judge replies by
        _evaluation(draft)
    if run is RLConfig:
        count_rollouts(draft)
    return TranslatedRun(command, structure_run(run, draft.settings), draft.notes)


def _check(draft: Draft) -> None:
    """Checks the numbers that others are divided by or rounded.

    Raises:
        ConfigurationError: one is too small.
    """
    for name in COUNTS:
        if name in draft.options and draft.value(name) is not None and draft.value(name) < 1:
            raise ConfigurationError(f"{draft.options[name]}: it must be at least 1: change --{name}.")
    if not 0 < draft.value("num_train_epochs") < math.inf:
        raise ConfigurationError(f"{draft.options['num_train_epochs']}: it must be above 0: change --num_train_epochs.")


def _with_file(flags: Sequence[Given], program: Program) -> tuple[list[Given], list[str]]:
    """Returns the flags of a file of settings, and then those of the command line, which win; and notes on what else
    the file has.

    Raises:
        ConfigurationError: there is no such file, or it has no `name: value` lines, or no value where one is needed.
    """
    paths = [given.values for given in flags if given.flag == "--config"]
    others = [given for given in flags if given.flag != "--config"]
    if not paths:
        return others, []
    try:
        (path,) = paths[-1]
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        shown = " ".join(paths[-1])
        raise ConfigurationError(f"--config is {shown!r}, which cannot be read as YAML: change --config.") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"--config is {path!r}, which has no `name: value` lines: change --config.")
    variables = settings.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ConfigurationError(f"env in {path} is no mapping of environment variables: change --config.")
    # Their names alone, for values may be secrets.
    lost = (
        [f"env in {path}: set before the command what it names: {', '.join(map(str, variables))}"] if variables else []
    )
    read = []
    for key, value in settings.items():
        values = value if isinstance(value, list) else [value]
        flag = program.flags.get(str(key))
        if value is None and flag is not None and flag.default is not None:
            raise ConfigurationError(
                f"{key} has no value in {path}, which needs one here: write it, or leave {key} out."
            )
        if value is not None:
            read.append(
                Given(
                    f"--{key}",
                    tuple(
                        yaml.safe_dump(part, default_flow_style=True, width=math.inf).strip()
                        if isinstance(part, dict)
                        else str(part)
                        for part in values
                    ),
                )
            )
    return [*read, *others], lost


def _model(draft: Draft) -> None:
    dtype = "bfloat16" if draft.value("bf16") else "float16" if draft.value("fp16") else draft.value("dtype")
    if dtype is None and "bf16" in draft.options:
        dtype = "float32"
    if dtype not in (None, "None"):
        draft.set("actor.dtype", dtype)
    if draft.value("use_peft", False):
        draft.set("actor.lora.rank", draft.value("lora_r", 16))
        draft.set("actor.lora.alpha", draft.value("lora_alpha", 32))
        draft.set("actor.lora.target_modules", draft.value("lora_target_modules", ["all-linear"]))
        if draft.value("use_rslora", False):
            draft.set("actor.lora.rslora", True)
        off = draft.value("disable_dropout", False)
        dora = draft.value("use_dora", False)
        draft.set("actor.lora.dropout", 0.0 if off or dora else draft.value("lora_dropout", LORA_DROPOUT))
        if dora:
            draft.set("actor.lora.dora", True)
            draft.change("use_dora", "nothing is left out of the inputs of adapters, in TRL what --lora_dropout says")
        if off:
            draft.lose("lora_dropout", "with --disable_dropout nothing is left out, in TRL too")
        if draft.value("load_in_4bit", False):
            draft.set("actor.lora.load_in_4bit", True)
        if "lora_target_modules" not in draft.options:
            draft.change("use_peft", "all linear layers get adapters, in TRL those that peft knows for the model")
        return
    for name in (
        "lora_r",
        "lora_alpha",
        "lora_target_modules",
        "lora_dropout",
        "load_in_4bit",
        "use_rslora",
        "use_dora",
    ):
        draft.lose(name, "all weights are trained without --use_peft")
    if not draft.value("disable_dropout", False):
        draft.lose("disable_dropout", "adapters alone leave anything out, and there are none without --use_peft")


def _optimizer(draft: Draft) -> None:
    draft.set("actor.adam.betas", [draft.value("adam_beta1"), draft.value("adam_beta2")])
    kind = draft.value("lr_scheduler_type")
    if kind not in SCHEDULERS and kind != "cosine_with_min_lr":
        draft.change("lr_scheduler_type", "cosine_with_min_lr takes its place")
    ours, warms_up, floor = SCHEDULERS.get(kind, ("cosine_with_min_lr", True, None))
    draft.set("actor.lr_scheduler", ours)
    if floor is not None:
        draft.set("actor.min_lr_ratio", floor)
    _schedule_kwargs(draft, kind)
    steps, limit = draft.value("warmup_steps", 0.0), draft.value("max_steps")
    share = draft.value("warmup_ratio", steps if steps < 1 else steps / limit if limit > 0 else 0.0)
    if steps >= 1 and limit <= 0:
        draft.lose("warmup_steps", "a share of the steps is needed, such as 0.03, where --max_steps is not given")
    if not warms_up:
        for name in ("warmup_steps", "warmup_ratio"):
            draft.lose(name, f"the {kind} schedule does not warm up, in TRL neither")
        share = 0.0
    draft.set("actor.lr_warmup_ratio", min(share, 0.999))


def _schedule_kwargs(draft: Draft, kind: str) -> None:
    """Translates the floor that a schedule is given.

    Raises:
        ConfigurationError: it is no number.
    """
    given = draft.mapping("lr_scheduler_kwargs")
    name = next((name for name in FLOORS.get(kind, ()) if name in given), None)
    floor = None if name is None else given.pop(name)
    if given or floor is None:
        draft.lose("lr_scheduler_kwargs", "see --actor.lr_scheduler, --actor.min_lr_ratio and --actor.lr_decay_ratio")
        return
    try:
        floor = float(floor)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"{draft.options['lr_scheduler_kwargs']}: {floor} is no number: change --lr_scheduler_kwargs."
        ) from None
    draft.set("actor.min_lr_ratio", floor / draft.value("learning_rate") if name == "min_lr" else floor)


def samples_per_step(draft: Draft) -> int:
    """Returns how many samples an optimizer step has, over all processes."""
    processes: int = draft.value("num_processes")
    samples: int = processes * draft.value("per_device_train_batch_size") * draft.value("gradient_accumulation_steps")
    return samples


def _length(draft: Draft, *, epochs: str) -> None:
    """Translates batches, the length of the run, and its processes."""
    draft.set("train.batch_size", samples_per_step(draft))
    steps, passes = draft.value("max_steps"), draft.value("num_train_epochs")
    if steps > 0:
        draft.set("train.max_steps", steps)
        draft.lose("num_train_epochs", "--max_steps says how long the run is, in TRL too")
    else:
        draft.set(epochs, math.ceil(passes))
        if passes != math.ceil(passes):
            draft.change("num_train_epochs", f"{math.ceil(passes)} whole ones")
    if draft.value("num_processes") > 1:
        draft.set("cluster.enable", True)
        draft.set("actor.num_gpus_per_node", draft.value("num_processes"))


def _output(draft: Draft) -> None:
    strategy, steps = draft.value("save_strategy"), draft.value("save_steps")
    if strategy == "steps" and steps >= 1:
        draft.set("ckpt.save_steps", int(steps))
        if not draft.value("save_only_model", False):
            draft.set("ckpt.state_steps", int(steps))
    else:
        draft.lose("save_strategy", "the model is saved at the end, and a training state every half hour")
        draft.lose("save_steps", "write a whole number of steps, with --save_strategy steps")
    if draft.value("save_only_model", False):
        draft.set("ckpt.state_minutes", None)
    if "save_total_limit" in draft.options:
        draft.set("ckpt.keep_models", draft.value("save_total_limit"))
        draft.set("ckpt.keep_states", draft.value("save_total_limit"))
    if draft.value("resume_from_checkpoint") not in (None, *NOTHING):
        draft.set("ckpt.resume", "always")
        draft.change("resume_from_checkpoint", "the run in --output_dir continues from its newest training state")
    if draft.value("disable_tqdm", False):
        draft.set("logger.console", False)
    repository = str(draft.value("hub_model_id"))
    if not draft.value("push_to_hub", False):
        draft.lose("hub_model_id", "nothing is uploaded without --push_to_hub, in TRL neither")
    elif "/" in repository:
        draft.set("ckpt.push_to_hub", repository)
        draft.change("push_to_hub", f"{UPLOADED}, and a repository that is made is private")
    else:
        draft.lose("push_to_hub", "name the repository with its owner: --hub_model_id me/name")
    _tracking(draft)


def _tracking(draft: Draft) -> None:
    asked = [name for value in draft.value("report_to") or () for name in value.split(",") if name not in NOTHING]
    ours = [name for name in asked if name in TRACKERS]
    if "tensorboard" in asked:
        draft.set("logger.tensorboard_dir", str(Path(draft.value("output_dir") or ".") / "tensorboard"))
    if others := sorted({*asked} - {*TRACKERS, "tensorboard"}):
        draft.lose("report_to", f"metrics are reported to {', '.join(TRACKERS)} or tensorboard, not to {others[0]}")
    if ours:
        draft.set("logger.report_to", ours)
    for name in ("project", "run_name"):
        if ours and name in draft.options:
            draft.set(f"logger.{name}", draft.value(name))
        else:
            draft.lose(name, "nothing is reported to a tracker")


def _dataset(draft: Draft) -> str | None:
    name, configuration = draft.value("dataset_name"), draft.value("dataset_config")
    return f"{name}:{configuration}" if name and configuration not in (None, "None") else name


def _evaluation(draft: Draft) -> None:
    strategy, dataset = draft.value("eval_strategy"), _dataset(draft)
    if strategy == "no" or dataset is None:
        for name in ("eval_steps", "dataset_test_split"):
            draft.lose(name, "nothing is evaluated without --eval_strategy, in TRL neither")
        return
    draft.set("eval.dataset", dataset)
    draft.set("eval.split", draft.value("dataset_test_split", "test"))
    every = draft.value("eval_steps", 10)
    if strategy == "steps" and every >= 1:
        draft.set("eval.steps", int(every))
        draft.change("eval_strategy", "evaluates before and after training as well")
    else:
        draft.change("eval_strategy", "evaluates before and after training, and in between with --eval_strategy steps")


def _sampling(finish: Callable[..., None]) -> Callable[[Draft], None]:
    return lambda draft: finish(draft, dataset=_dataset(draft), samples=samples_per_step(draft))


FINISH: Mapping[str, Callable[[Draft], Any]] = {
    "sft": lambda draft: finish_sft(draft, _dataset(draft)),
    "dpo": lambda draft: finish_dpo(draft, _dataset(draft)),
    "kto": lambda draft: finish_kto(draft, _dataset(draft)),
    "reward": lambda draft: finish_reward(draft, _dataset(draft)),
    "grpo": _sampling(finish_grpo),
    "rloo": _sampling(finish_rloo),
    "distillation": _sampling(finish_distillation),
}
"""Functions that translate a command's flags that depend on each other."""
