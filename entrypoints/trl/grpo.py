"""Translates what `trl grpo` has of its own: rollouts, rewards, the loss and its normalisation."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollgrad.application.settings.sections.rollout import RolloutConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.translation.draft import Draft
from rollgrad.entrypoints.trl.moving_reference import follow_policy

LOSSES: Mapping[str, tuple[str, str | None]] = {
    "dapo": ("ppo", "token_mean"),
    "bnpo": ("ppo", "token_mean"),
    "grpo": ("ppo", "sequence_mean"),
    "dr_grpo": ("ppo", "constant_length"),
    "cispo": ("cispo", None),
    "luspo": ("ppo", "sequence_sum"),
    "sapo": ("sapo", None),
    "vespo": ("vespo", None),
}
"""TRL's losses: our loss, and how it is aggregated."""

PAIRS: Mapping[str, tuple[str, tuple[str, str]]] = {
    "actor.sapo_tau": ("sapo", ("sapo_temperature_pos", "sapo_temperature_neg")),
    "actor.vespo_k": ("vespo", ("vespo_k_pos", "vespo_k_neg")),
    "actor.vespo_lambda": ("vespo", ("vespo_lambda_pos", "vespo_lambda_neg")),
}
"""Settings of a loss for positive and negative advantages: the loss, and TRL's flags."""

SCALES = {
    "group": "group_norm",
    "true": "group_norm",
    "batch": "lite_ppo",
    "none": "dr_grpo",
    "false": "dr_grpo",
}
"""Estimators by TRL's scale of rewards."""

VERIFIERS = {"accuracy_reward": "math"}
"""Built-in rewards by TRL's name."""

GPU_MEMORY = 0.3
"""TRL's share of a GPU for an engine beside the model that is trained."""

OF_ENGINES = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length")
"""Flags that say how TRL starts engines of its own."""

OF_CORRECTION = (
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
)
"""Flags that say how TRL corrects for the difference between vLLM's log-probs and the trainer's."""

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""TRL's modes of it: the level, and what becomes of a ratio outside the bounds."""

COUNTED = ("train.max_steps", "ckpt.save_steps", "ckpt.state_steps", "eval.steps")
"""Settings that count rollouts, where TRL counts optimizer steps."""


def finish_grpo(draft: Draft, *, dataset: str | None, samples: int) -> None:
    """Sets `data`, `rollout`, `reward`, `algo` and the loss of the actor.

    Args:
        draft: the translation.
        dataset: dataset of the prompts.
        samples: samples of an optimizer step.

    Raises:
        ConfigurationError: there is no such loss or normalisation here.
    """
    if dataset is not None:
        draft.set("data.prompt_dataset", dataset)
    if "dataset_train_split" in draft.options:
        draft.set("data.prompt_split", draft.value("dataset_train_split"))
    draft.changed.append(
        "prompts that are texts are rendered with the chat template, in TRL messages alone: set "
        "data.apply_chat_template False for texts"
    )
    draft.change(
        "max_prompt_length", "longer prompts are left out, which earlier releases of TRL cut at their beginning"
    )
    draft.lose("dataset_num_proc", "prompts are read in the process itself")
    _rollouts(draft, samples)
    _rewards(draft)
    _kl(draft)
    _loss(draft)
    if draft.value("use_vllm", False):
        _engines(draft)
    else:
        for name in ("vllm_mode", *OF_ENGINES, *OF_CORRECTION):
            draft.lose(name, "vLLM does not sample without --use_vllm")
    _correction(draft)


def _engines(draft: Draft) -> None:
    """Translates vLLM: a server, or engines on the GPUs of the processes that train."""
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
    updates *= math.ceil(draft.settings["rollout"]["batch_size"] * draft.value("num_generations") / data)
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
        draft.set("eval.n_samples_per_prompt", draft.value("num_generations_eval", draft.value("num_generations")))


def _rollouts(draft: Draft, samples: int) -> None:
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


def _rewards(draft: Draft) -> None:
    functions = draft.value("reward_funcs", [])
    if not functions:
        return
    known = [VERIFIERS[name] for name in functions if name in VERIFIERS]
    if known and len(functions) == 1 and "reward_model_name_or_path" not in draft.options:
        draft.set("reward.verifier", known[0])
        draft.change("reward_funcs", "the verifier math compares with the column of data.label_key")
    elif len(functions) == 1 and (place := _function_path(functions[0])) is not None:
        draft.set("reward.function_path", place)
    elif len(functions) == 1:
        draft.lose("reward_funcs", "write reward.function_path FILE.py:NAME, with the function's own file and name")
    else:
        draft.lose(
            "reward_funcs",
            "write a file with one function that returns their rewards by name, and set reward.function_path "
            "(docs/migration.md, Scripts of TRL)",
        )


def _function_path(dotted: str) -> str | None:
    """Returns the file and name of a function in a module of the working directory, such as `my_lib.rewards.length`."""
    module, _, name = dotted.rpartition(".")
    file = Path(*module.split(".")).with_suffix(".py") if module else None
    return f"{file}:{name}" if file is not None and file.is_file() else None


def _kl(draft: Draft) -> None:
    beta = draft.value("beta")
    if not beta:
        for name in ("use_bias_correction_kl", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"):
            draft.lose(name, "there is no KL without --beta, in TRL neither")
        return
    follow_policy(draft, "algo.kl")
    draft.set("algo.kl.init_coef", beta)
    draft.set("algo.kl.use_loss", True)
    draft.set("algo.kl.estimator", "k3_unbiased" if draft.value("use_bias_correction_kl") else "k3")


def _correction(draft: Draft) -> None:
    """Translates the off-policy correction: a mask of negative replies, or vLLM's ratio within bounds.

    Raises:
        ConfigurationError: there is no such mode.
    """
    threshold, mode = draft.value("off_policy_mask_threshold"), draft.value("vllm_importance_sampling_mode")
    corrects = draft.value("use_vllm", False) and draft.value("vllm_importance_sampling_correction")
    corrects = corrects and draft.value("loss_type") != "vespo"  # whose own ratio is against vLLM
    if corrects and mode not in CORRECTIONS:
        raise ConfigurationError(
            f"--vllm_importance_sampling_mode is {mode}, but there are {', '.join(CORRECTIONS)}: change it."
        )
    if (threshold is not None or corrects) and (draft.value("top_p", 1.0) < 1 or draft.value("top_k", 0) > 0):
        told = "samples are not corrected, for of less than the full distribution (--top_p, --top_k) no ratio is right"
        draft.changed.append(told)
    elif threshold is not None:
        draft.set("algo.old_logprobs", "rollout")
        _set_correction(draft, level="sequence", mode="mask", gate="opsm", threshold=threshold)
        if corrects:
            draft.change("off_policy_mask_threshold", "ratios are against vLLM's log-probs, which nothing else bounds")
    elif corrects:
        level, _, kind = mode.partition("_")
        low = draft.value("vllm_importance_sampling_clip_min")
        high = draft.value("vllm_importance_sampling_cap", draft.value("vllm_importance_sampling_clip_max"))
        if kind == "mask":
            _set_correction(draft, level=level, mode="mask", low=low or 0.0, high=high)
        elif low is None:
            _set_correction(draft, level=level, mode="truncate", high=high)
        else:
            _set_correction(draft, level=level, mode="clip", low=low, high=high)
        if mode == "sequence_mask":
            draft.changed.append(
                "tokens of a reply whose ratio to vLLM is within bounds weigh by their own ratio, in TRL by the reply's"
            )


def _set_correction(draft: Draft, **settings: Any) -> None:
    for key, value in settings.items():
        draft.set(f"algo.correction.{key}", value)


def _loss(draft: Draft) -> None:
    kind, scale = draft.value("loss_type"), str(draft.value("scale_rewards")).lower()
    if kind not in LOSSES:
        raise ConfigurationError(f"--loss_type is {kind}, but there are {', '.join(LOSSES)}: change --loss_type.")
    if scale not in SCALES:
        raise ConfigurationError(
            f"--scale_rewards is {scale}, but there are group, batch and none: change --scale_rewards."
        )
    loss, aggregation = LOSSES[kind]
    if draft.value("importance_sampling_level") == "sequence":
        if loss != "ppo":
            raise ConfigurationError(
                f"--importance_sampling_level is sequence, which {loss} has not here: change --loss_type or "
                "--importance_sampling_level."
            )
        loss = "gspo"
    draft.set("algo.advantage.estimator", SCALES[scale])
    draft.set("actor.policy_loss_type", loss)
    if aggregation is not None:
        draft.set("actor.loss_aggregation", aggregation)
    low = draft.value("epsilon")
    high = draft.value("epsilon_high", low)
    if loss == "cispo":  # TRL bounds the ratio by epsilon_high itself, not by 1 more
        draft.set("actor.eps_clip_low_high", [1.0, max(0.0, high - 1)])
        if high < 1:
            draft.changed.append(f"ratios are bounded by 1, in TRL with cispo by --epsilon_high, which is {high:g}")
    elif loss in ("ppo", "gspo"):
        draft.set("actor.eps_clip_low_high", [low, high])
    for setting, (owner, flags) in PAIRS.items():
        if loss == owner:
            draft.set(setting, [draft.value(flag) for flag in flags])
        else:
            for flag in flags:
                draft.lose(flag, f"it is of --loss_type {owner}, in TRL too")
    if loss == "vespo" and draft.value("use_vllm", False):
        draft.set("algo.old_logprobs", "rollout")
        draft.change(
            "loss_type", "vespo's ratios are against vLLM's log-probs as they are, in TRL bounded token by token"
        )
