"""Checks before a run starts: whether its files exist, its memory and its counts.

`file_problems` looks at local paths, and at settings that are a library's own, without which it imports nothing heavy;
`show_plan` reads the shapes of models, but never loads weights. Does not own: prompts and rewards (`rehearsal`).
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from attrs import evolve

from rollgrad.adapters.checkpoints.hub import check_upload
from rollgrad.application.settings.correction import correction_summary
from rollgrad.application.settings.derived import longest_sample, optimizer_steps_per_rollout
from rollgrad.application.settings.memory_places import Machine, RoleMemory, gpu_count, places, shortages
from rollgrad.application.settings.memory_plan import memory_plan
from rollgrad.application.settings.memory_plan_passes import MIB
from rollgrad.application.settings.model_shape import ModelShape
from rollgrad.application.settings.rules.inputs import dataset_names
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import AdapterConfig, Checkpointing, RouterReplay
from rollgrad.application.settings.sections.eval import EvalConfig
from rollgrad.application.settings.sections.optimizer import Optim
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.time_floor import least_seconds, step_work
from rollgrad.application.settings.unit_ratio import idle_sentence, uncorrected_sentence
from rollgrad.application.settings.way_out import way_out
from rollgrad.application.settings.weight_backend import sync_backend
from rollgrad.domain.errors import ConfigurationError, DataError, RollgradError
from rollgrad.entrypoints.named_paths import check_dataset, check_model, check_reward_file, check_written
from rollgrad.entrypoints.planned_machine import PlannedMachine, elsewhere_sentence, planned_machine
from rollgrad.entrypoints.run_directory import check_output

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

Becomes = Callable[[ModelShape], ModelShape]
"""Gives the shape of what a run makes of the actor's model."""

SECTIONS = {"actor": "actor", "critic": "critic", "reference": "ref", "reward": "reward"}
"""The section of settings of each role that has a model."""


def file_problems(config: RLConfig) -> dict[str, RollgradError]:
    """Returns the settings of a training run that name a wrong local path, each with its error: one that does not
    exist, or an output directory that cannot be written. Names of the hub pass, because only the hub knows them."""
    problems = eval_file_problems(config)
    for key in ("critic.model_name_or_path", "ref.model_name_or_path"):
        _note(problems, key, check_model, key, attrgetter(key)(config))
    for name in dataset_names(config.data.prompt_dataset):
        _note(problems, "data.prompt_dataset", check_dataset, "data.prompt_dataset", name)
    problems |= _written_problems(config)
    problems |= _ds_problems(config)
    return problems


def _written_problems(run: Any) -> dict[str, RollgradError]:
    """Returns what is wrong with the places that a training run writes to."""
    problems: dict[str, RollgradError] = {}
    _note(problems, "ckpt.output_dir", check_output, run)
    cache = ("data.cache_dir",) if hasattr(run.data, "cache_dir") else ()
    for key in ("ckpt.output_dir", "ckpt.state_dir", "logger.tensorboard_dir", *cache):
        _note(problems, key, check_written, key, attrgetter(key)(run))
    if run.ckpt.push_to_hub is not None:
        _note(problems, "ckpt.push_to_hub", check_upload, run.ckpt.push_to_hub)
    return problems


def eval_file_problems(config: RLConfig) -> dict[str, RollgradError]:
    """Returns the settings of an evaluation that name a wrong path, each with its error."""
    problems: dict[str, RollgradError] = {}
    for key in ("actor.model_name_or_path", "reward.model_name_or_path"):
        _note(problems, key, check_model, key, attrgetter(key)(config))
    for name in dataset_names(config.eval.dataset or ""):
        _note(problems, "eval.dataset", check_dataset, "eval.dataset", name)
    _note(problems, "reward.function_path", check_reward_file, config)
    problems |= _vllm_problems(config)
    return problems


def generation_file_problems(config: RLConfig) -> list[RollgradError]:
    """Returns what is wrong with the paths that sampling reads."""
    problems: dict[str, RollgradError] = {}
    _note(
        problems, "actor.model_name_or_path", check_model, "actor.model_name_or_path", config.actor.model_name_or_path
    )
    for name in dataset_names(config.data.prompt_dataset):
        _note(problems, "data.prompt_dataset", check_dataset, "data.prompt_dataset", name)
    problems |= _vllm_problems(config)
    return list(problems.values())


def scoring_file_problems(config: RLConfig) -> list[RollgradError]:
    """Returns what is wrong with the paths that scoring reads, besides those of the replies."""
    problems = eval_file_problems(evolve(config, eval=EvalConfig()))
    return list(problems.values())


def example_file_problems(run: Any) -> list[RollgradError]:
    """Returns what is wrong with the paths of a run over examples: those of its models, of its rows, and of what it
    writes."""
    problems: dict[str, RollgradError] = {}
    for name in ("actor", "ref", "teacher"):
        if hasattr(run, name):
            key = f"{name}.model_name_or_path"
            _note(problems, key, check_model, key, getattr(run, name).model_name_or_path)
    for key in ("data.dataset", "eval.dataset"):
        for name in dataset_names(attrgetter(key)(run) or ""):
            _note(problems, key, check_dataset, key, name)
    problems |= _written_problems(run)
    problems |= _ds_problems(run)
    return list(problems.values())


def _vllm_problems(config: RLConfig) -> dict[str, RollgradError]:
    """Returns what is wrong with the names in `vllm.extra`, with the sizes by which vLLM divides the model, and with
    what it is to do on this machine."""
    from rollgrad.adapters.engines.vllm.arguments import argument_problems

    extra = config.vllm.extra or {}
    found = [*argument_problems(extra)]
    if config.rollout.engine is Engine.VLLM and config.vllm.gpus_per_engine > 1 and config.actor.model_name_or_path:
        found += _division_problems(config)
    problems: dict[str, RollgradError] = {problem: ConfigurationError(problem) for problem in found}
    if config.actor.router_replay is RouterReplay.ENGINE and not config.cluster.enable:
        from rollgrad.entrypoints.composition.engines import check_experts_are_recorded
        from rollgrad.entrypoints.composition.models import has_gpu

        _note(problems, "actor.router_replay", lambda: check_experts_are_recorded(config, gpus=has_gpu()))
    return problems


def _division_problems(config: RLConfig) -> list[str]:
    import torch

    from rollgrad.adapters.engines.vllm.division import division_problems
    from rollgrad.adapters.models.torch.loading.loading import load_model_config

    try:
        model = load_model_config(config.actor.model_name_or_path, flag="--actor.model_name_or_path")
    except RollgradError:  # the problem is reported where the model is looked for
        return []
    sizes = config.vllm.tensor_parallel_size, config.vllm.pipeline_parallel_size
    here = None if config.cluster.enable else torch.cuda.device_count() or None
    return [*division_problems(model, *sizes, extra=config.vllm.extra or {}, gpus=here)]


def _ds_problems(run: Any) -> dict[str, RollgradError]:
    """Returns what is wrong with `ds.extra` of a run that has it."""
    from rollgrad.adapters.models.deepspeed.extra import config_problems

    extra = run.ds.extra if hasattr(run, "ds") and run.cluster.enable else None
    return {problem: ConfigurationError(problem) for problem in config_problems(extra or {})}


def _note(problems: dict[str, RollgradError], key: str, check: Callable[..., None], *arguments: Any) -> None:
    """Runs `check(*arguments)`, and adds its error to `problems` under `key`."""
    try:
        check(*arguments)
    except RollgradError as error:
        problems.setdefault(key, error)
    except OSError as error:  # a name that is too long, or a directory that may not be looked into
        why = error.strerror or error
        problems.setdefault(key, DataError(f"{key} names a place that cannot be read ({why}): check --{key}."))


def as_it_is(shape: ModelShape) -> ModelShape:
    """Returns the shape: the actor stays what it is."""
    return shape


def show_plan(
    config: RLConfig, console: "Console", *, samples: bool = True, becomes: Becomes = as_it_is, told: int = 0
) -> list[str]:
    """Prints the memory plan of a run whose settings hold; returns a sentence for each place where it does not fit.

    Args:
        config: settings of the run.
        console: where the plan is printed.
        samples: whether the run learns from what it samples; then the least time of a step, and corrections, are
            printed, too.
        becomes: function from the actor's shape to that of the model that is trained.
        told: tokens that each prompt may have more for a teacher, as in `memory_plan`.

    Raises:
        CheckpointError: a model cannot be found.
        ConfigurationError: a model cannot be divided as the settings say.
    """
    planned = planned_machine(config)
    machine, device, dtype = planned.machine, planned.device, planned.dtype
    shapes = _shapes(config, dtype, device, becomes=becomes)
    rows = _rows(config, shapes, machine, dtype, told)
    console.print(_memory_table(rows, planned, reading(config, rows)))
    if config.cluster.enable and machine.gpu:
        console.print(gpu_count(rows))
    for place in places(rows, machine):
        console.print(f"{_mib(place.held)} MiB at once in {place.name}, which has {_mib(place.available)}")
    for role in _padded_roles(rows, shapes):
        console.print(
            f"{role}: computed with padding, exactly but slower, each sequence with its whole prompt; when it is "
            "loaded, a warning says why"
        )
    if samples and (floor := _time_floor(config, rows, shapes, planned)):
        console.print(floor)
    if elsewhere := elsewhere_sentence(config):
        console.print(elsewhere)
    if config.rollout.engine is Engine.VLLM:
        console.print(_weights_way(config, planned))
    for name, words in correction_summary(config).items() if samples else ():
        console.print(f"{'off-policy correction' if name == 'weights' else '  ' + name}: {words}")
    for sentence in filter(None, (idle_sentence(config), uncorrected_sentence(config))):
        console.print(sentence)
    short = list(shortages(rows, machine))
    if not short:
        return []
    shapes_of = cache(
        lambda kind, offloads: _shapes(_recomputed(config, kind, offloads), dtype, device, becomes=becomes)
    )
    fits = partial(_fits, shapes_of=shapes_of, machine=machine, dtype=dtype, told=told)
    way = way_out(config, machine, fits)
    return short if way is None else [*short[:-1], f"{short[-1]} {way}"]


def _rows(
    config: RLConfig, shapes: dict[str, ModelShape], machine: Machine, dtype: "torch.dtype", told: int = 0
) -> list[RoleMemory]:
    return memory_plan(
        config,
        shapes["actor"],
        compute_bytes=dtype.itemsize,
        machine=machine,
        critic=shapes.get("critic"),
        reference=shapes.get("reference"),
        reward=shapes.get("reward"),
        told=told,
    )


def _recomputed(config: RLConfig, kind: Checkpointing, offloads: bool) -> RLConfig:
    return evolve(config, actor=evolve(config.actor, gradient_checkpointing=kind, offload_activations=offloads))


def _fits(
    config: RLConfig,
    *,
    shapes_of: Callable[[Checkpointing, bool], dict[str, ModelShape]],
    machine: Machine,
    dtype: "torch.dtype",
    told: int,
) -> bool:
    shapes = shapes_of(config.actor.gradient_checkpointing, config.actor.offload_activations)
    return not [*shortages(_rows(config, shapes, machine, dtype, told), machine)]


def _weights_way(config: RLConfig, planned: PlannedMachine) -> str:
    """Returns a sentence about the way of weights to the engines.

    Raises:
        ConfigurationError: it needs GPUs, and there are none.
    """
    from rollgrad.adapters.engines.vllm.builds import cpu_builds

    # A cluster that is joined may have GPUs where this machine has none.
    without = "" if planned.told else cpu_builds()
    gpus = planned.device.type == "cuda" or config.cluster.address is not None
    way = sync_backend(config, gpus=gpus, without=without)
    return f"weights go to the engines by {way}" + (f": {without}" if without else "")


def _padded_roles(rows: list[RoleMemory], shapes: dict[str, ModelShape]) -> list[str]:
    """Returns the roles whose models are trained, or score what is, and are computed padded."""
    passes = {row.role: shapes.get(row.role, shapes["actor"]).passes for row in rows}
    return [role for role in ("actor", "critic", "reference") if (found := passes.get(role)) and found.padded]


def _shapes(
    config: RLConfig, dtype: "torch.dtype", device: "torch.device", *, becomes: Becomes = as_it_is
) -> dict[str, ModelShape]:
    """Returns the shape of the actor, and of each other model that the settings name, by its role."""
    from rollgrad.adapters.models.torch.planning.pass_memory import measured_passes
    from rollgrad.adapters.models.torch.planning.shape import model_shape

    passes = partial(
        measured_passes,
        dtype=dtype,
        device=device,
        longest=longest_sample(config),
        checkpointing=config.actor.gradient_checkpointing,
        offloads=config.actor.offload_activations,
    )
    lora: dict[str, AdapterConfig] = {"actor": config.actor.lora, "critic": config.critic.lora}
    named = {role: getattr(config, section).model_name_or_path for role, section in SECTIONS.items()}
    if config.critic.lora.rank and not named["critic"]:  # else it has the actor's shape
        named["critic"] = named["actor"]
    shapes = {
        role: evolve(
            model_shape(
                f"{SECTIONS[role]}.model_name_or_path",
                name,
                lora.get(role),
                expert_parallel_size=config.cluster.expert_parallel_size,
                sequence_parallel_size=config.ds.sequence_parallel_size,
                images=config.data.image_key is not None,
            ),
            passes=passes(name, judges=role == "reward", prompt=config.data.prompt_limit if role == "actor" else None),
        )
        for role, name in named.items()
        if name
    }
    return {**shapes, "actor": becomes(shapes["actor"])}


def _time_floor(
    config: RLConfig,
    rows: list[RoleMemory],
    shapes: dict[str, ModelShape],
    planned: PlannedMachine,
) -> str | None:
    """Returns the least time of a step as a sentence; None where a model could not be measured."""
    speed, models = planned.speed, {row.role: shapes.get(row.role, shapes["actor"]) for row in rows}
    work = step_work(config, rows, models, speed, planned.machine)
    if not work:
        return None
    of_roles = ", ".join(f"{part.role} {part.seconds:,.2f}" for part in work)
    return (
        f"A step takes at least {least_seconds(work):,.2f} s if its samples are as long as they may be and all have an "
        f"advantage: products of matrices ({of_roles}) at {speed / 1e12:,.3f} TFLOP/s, {planned.source}. "
        "Attention, sampling one token after the other, the optimizer, communication and waiting come on top."
    )


def _memory_table(rows: list[RoleMemory], planned: PlannedMachine, more: str) -> "Table":
    from rich.table import Table

    title = f"Memory plan: MiB of one process{planned.heading}"
    table = Table(
        *("role", "processes", "where", "weights", "gradients", "optimizer", "activations", "total"),
        title=title,
        padding=0,  # so that the headings fit into 80 columns
    )
    aside = {"loading": attrgetter("loading"), "offloaded": attrgetter("offloaded"), "at rest": attrgetter("rests")}
    notes = ["activations: and what ZeRO gathers for a pass; of engines, keys and values" + more]
    for row in rows:
        shares = any(other.device == row.device for other in rows if other is not row)
        where = "memory" if not planned.machine.gpu else "shared GPU" if shares else "GPU"
        parts = (row.weights, row.gradients, row.optimizer, row.passes, row.total)
        table.add_row(row.role, str(row.processes), where, *map(_mib, parts))
        for words, held in aside.items():
            if held(row):
                table.add_row(row.role, str(row.processes), words, "", "", "", "", _mib(held(row)))
    if any(held(row) for row in rows for held in aside.values()):
        notes.append("loading, offloaded, at rest (while engines sample): in the machine's memory")
    table.caption = "\n".join(notes)
    return table


def reading(config: RLConfig, rows: Sequence[RoleMemory]) -> str:
    """Returns how the bytes are to be read where images are seen, and of roles whose optimizer is not AdamW; else
    nothing."""
    sees = config.data.image_key is not None
    words = "; the pass of images through their tower is not counted, in time neither" if sees else ""
    for role in ("actor", "critic"):
        section = getattr(config, role, None)
        if section is None or role not in {row.role for row in rows}:
            continue
        if section.optim_path is not None:
            words += f"; {role}'s optimizer counts two numbers a parameter, whatever {section.optim_path} keeps"
        elif section.optim is Optim.MUON:
            words += f"; {role}'s optimizer is an upper bound: Muon keeps one number of a matrix where two are counted"
    return words


def _mib(count: int) -> str:
    return f"{count / MIB:,.0f}"


def counts(config: RLConfig, prompts: int) -> str:
    """Returns the counts of a run over `prompts` prompts as a sentence."""
    rollout = config.rollout
    rollouts = config.train.max_steps or math.ceil(config.train.num_episodes * prompts / rollout.batch_size)
    steps = optimizer_steps_per_rollout(config)
    samples = rollout.batch_size * rollout.n_samples_per_prompt
    words = (_number(rollouts, "rollout"), _number(rollouts * steps, "optimizer step"))
    return (
        f"Counts: {words[0]} of {samples:,} samples ({rollout.batch_size:,} prompts x "
        f"{rollout.n_samples_per_prompt:,}); {words[1]}, {steps:,} a rollout."
    )


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
