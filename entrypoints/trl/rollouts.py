"""Translates what TRL's commands that sample have in common: prompts, groups, rewards and vLLM."""

import math
from collections.abc import Sequence
from pathlib import Path

from rollgrad.application.settings.function_path import FunctionPath
from rollgrad.application.settings.sections.rollout import RolloutConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.translation.draft import Draft

VERIFIERS = {"accuracy_reward": "math"}
"""Built-in rewards by TRL's name."""

FROM_TRL = {"reasoning_accuracy_reward", "think_format_reward"}
"""Functions that TRL knows by a name alone, and that its package has."""

LOST = {
    "get_soft_overlong_punishment": "reward.overlong_buffer_len 256 does it, for replies of rollout.max_new_tokens, "
    "which is 1280 there"
}
"""Rewards that are none here, and the settings in their place."""

WRITTEN = "write reward.function_path FILE.py:NAME, with the function's own file and name"

GPU_MEMORY = 0.3
"""TRL's share of a GPU for an engine beside the model that is trained."""

OF_ENGINES = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length")
"""Flags that say how TRL starts engines of its own."""

TRUNCATED = "means over replies are over the others alone, in TRL over all"
"""The note on replies that are left out because they were cut off."""

COUNTED = ("train.max_steps", "ckpt.save_steps", "ckpt.state_steps", "eval.steps")
"""Settings that count rollouts, where TRL counts optimizer steps."""


def set_prompts(draft: Draft, dataset: str | None) -> None:
    """Sets the dataset of the prompts, and what their template is told.

    Raises:
        ConfigurationError: that is no mapping.
    """
    if dataset is not None:
        draft.set("data.prompt_dataset", dataset)
    if "dataset_train_split" in draft.options:
        draft.set("data.prompt_split", draft.value("dataset_train_split"))
    if template := draft.mapping("chat_template_kwargs"):
        draft.set("data.chat_template_kwargs", template)
    draft.changed.append(
        "prompts that are texts are rendered with the chat template, in TRL messages alone: set "
        "data.apply_chat_template False for texts"
    )
    draft.change(
        "max_prompt_length", "longer prompts are left out, which earlier releases of TRL cut at their beginning"
    )
    draft.lose("dataset_num_proc", "prompts are read in the process itself")


def set_engines(draft: Draft) -> None:
    """Translates vLLM: a server, or engines on the GPUs of the processes that train.

    Raises:
        ConfigurationError: processes cannot share engines as they say.
    """
    if not draft.value("use_vllm", False):
        for name in ("vllm_mode", *OF_ENGINES):
            draft.lose(name, "vLLM does not sample without --use_vllm")
        return
    if draft.value("vllm_mode") == "server":
        draft.set("rollout.engine", "server")
        for name in OF_ENGINES:
            draft.lose(name, "the server has its own, in TRL too")
        return
    draft.set("rollout.engine", "vllm")
    draft.set("vllm.gpu_memory_utilization", draft.value("vllm_gpu_memory_utilization", GPU_MEMORY))
    if "vllm_max_model_length" in draft.options:
        draft.set("vllm.max_model_len", draft.value("vllm_max_model_length"))
    processes, size = draft.value("num_processes"), draft.value("vllm_tensor_parallel_size", 1)
    draft.set("vllm.tensor_parallel_size", size)
    if processes > 1:
        if size < 1 or processes % size:
            raise ConfigurationError(
                f"--vllm_tensor_parallel_size {size}: so many processes share an engine, in TRL too, but it does not "
                f"divide --num_processes {processes}: change one of them."
            )
        draft.set("train.colocate_all", True)
        draft.set("vllm.num_engines", processes // size)


def count_rollouts(draft: Draft) -> None:
    """Counts rollouts where TRL counts optimizer steps, and has evaluations sample as TRL's do; the other settings are
    there already."""
    data, updates = draft.settings["train"]["batch_size"], draft.value("num_iterations", 1)
    updates *= math.ceil(draft.settings["rollout"]["batch_size"] * draft.value("num_generations", 1) / data)
    if updates > 1:
        for setting in COUNTED:
            section, key = setting.split(".")
            count = draft.settings.get(section, {}).get(key, 0)
            if count > 0:
                draft.set(setting, math.ceil(count / updates))
        draft.changed.append(
            f"a step here is a rollout with its {updates} optimizer steps, which TRL counts: numbers of steps are "
            f"divided by {updates}"
        )
    if draft.settings.get("eval", {}).get("dataset") is not None:
        for name in ("temperature", "top_p", "top_k"):
            draft.set(f"eval.{name}", draft.value(name, getattr(RolloutConfig(), name)))
        draft.set("eval.n_samples_per_prompt", draft.value("num_generations_eval", draft.value("num_generations", 1)))


def set_groups(draft: Draft, samples: int) -> None:
    """Sets how many prompts a rollout has, `samples` being those of an optimizer step.

    Raises:
        ConfigurationError: its completions are no whole groups.
    """
    group, accumulated = draft.value("num_generations"), draft.value("gradient_accumulation_steps")
    steps = draft.value("steps_per_generation", accumulated)
    completions = draft.value("generation_batch_size", samples // accumulated * steps)
    if completions % group:
        raise ConfigurationError(
            f"A rollout has {completions} completions, which are no whole groups of {group}: change "
            "--per_device_train_batch_size, --gradient_accumulation_steps or --num_generations."
        )
    if samples % completions == 0:  # rollouts between which the weights stay the same are one
        completions = samples
    draft.set("rollout.batch_size", completions // group)
    draft.set("train.batch_size", min(samples, completions))


def set_rewards(draft: Draft) -> None:
    """Sets the rewards, if all have counterparts, and their weights, or names what is to be written.

    Raises:
        ConfigurationError: there is another number of weights than of rewards, or one is no number.
    """
    named = draft.value("reward_funcs", [])
    places = {name: _function_path(name) for name in named if name not in VERIFIERS}
    for name in (name for name, place in places.items() if place is None):
        draft.lose("reward_funcs", f"{name}: {LOST.get(name, WRITTEN)}")
    if None in places.values():
        return  # a part of the rewards would train for something else
    if FROM_TRL & places.keys():
        draft.change("reward_funcs", "functions of trl.rewards are taken from that package, which is to be installed")
    if verifiers := [VERIFIERS[name] for name in named if name in VERIFIERS]:
        draft.set("reward.verifier", verifiers[0])
        draft.change("reward_funcs", "the verifier math compares with the column of data.label_key")
    if places:
        draft.set("reward.function_path", ",".join(map(str, places.values())))
    parts = ["model"] if "reward_model_name_or_path" in draft.options else []  # the first one there
    parts += [VERIFIERS.get(name) or FunctionPath.parse(str(places[name])).part for name in named]
    _set_weights(draft, parts)


def _set_weights(draft: Draft, parts: Sequence[str]) -> None:
    given = draft.value("reward_weights")
    try:
        weights = [1.0] * len(parts) if given is None else [float(word) for word in given]
    except ValueError:
        weights = []
    if len(weights) != len(parts):
        raise ConfigurationError(
            f"--reward_weights is {' '.join(given)}, but the rewards are {', '.join(parts) or 'none'}: give one number "
            "for each."
        )
    if len(parts) > 1:
        draft.set("reward.weights", dict(zip(parts, weights, strict=True)))
    elif weights != [1.0]:
        draft.lose("reward_weights", "a reward alone has no weight: advantages and the learning rate scale with it")


def _function_path(dotted: str) -> str | None:
    """Returns the file and name of a function in a module of the working directory, such as `my_lib.rewards.length`."""
    if dotted in FROM_TRL:
        return f"trl.rewards:{dotted}"
    module, _, name = dotted.rpartition(".")
    file = Path(*module.split(".")).with_suffix(".py") if module else None
    return f"{file}:{name}" if file is not None and file.is_file() else None
