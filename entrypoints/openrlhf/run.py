"""The run of an OpenRLHF command: batches, lengths, rewards, data and evaluation."""

import re

from rollgrad.entrypoints.openrlhf.draft import RLDraft
from rollgrad.entrypoints.openrlhf.shared import translate_text, translate_tracking

PROMPT_TOKENS = 1024
"""OpenRLHF's default limit of prompts and of replies, in tokens."""

REWARD_TIMEOUT = 180.0
"""Seconds that OpenRLHF waits for a reward server; for a reward model it waits without end."""


def translate_run(draft: RLDraft) -> None:
    """Sets `rollout`, `train`, `reward`, `data`, `logger` and `eval`.

    Raises:
        ConfigurationError: a value is not of its flag's kind.
    """
    _batches(draft)
    _lengths(draft)
    _reward(draft)
    translate_text(draft)
    translate_tracking(draft)
    _evaluation(draft)


def _batches(draft: RLDraft) -> None:
    prompts, samples = draft.value("rollout.batch_size", 1024), draft.value("rollout.n_samples_per_prompt", 1)
    draft.set("rollout.batch_size", prompts)
    draft.set("rollout.n_samples_per_prompt", samples)
    batch = draft.value("train.batch_size", 128)
    if batch > prompts * samples:
        draft.change("train.batch_size", f"{prompts * samples}, for a rollout has no more samples")
        batch = prompts * samples
    draft.set("train.batch_size", batch)
    _passes(draft)
    _overlap(draft, prompts)
    if draft.value("train.enable_ema", False):
        draft.set("train.ema_beta", draft.value("train.ema_beta", 0.992))
        draft.change(
            "train.enable_ema", "the averages are saved in ema below the trained model, in OpenRLHF instead of it"
        )
    else:
        draft.lose("train.ema_beta", "no average is kept without --enable_ema, in OpenRLHF neither")


PASSES = {"train": "train.max_tokens_per_micro_batch", "rollout": "train.max_tokens_per_scoring_pass"}
"""Budgets of passes with gradients, and of those without."""


def _passes(draft: RLDraft) -> None:
    """Translates how much goes through a model at once: tokens with dynamic batches, else samples, each of which is
    counted as long as the longest."""
    dynamic = draft.value("train.dynamic_batch_enable", False)
    if dynamic:
        draft.set("train.max_tokens_per_micro_batch", draft.value("train.max_tokens_per_gpu", 16192))
    for section, ours in PASSES.items():
        tokens, samples = f"{section}.max_tokens_per_gpu", f"{section}.micro_batch_size"
        if dynamic:
            if tokens in draft.options:
                draft.set(ours, draft.value(tokens))
            draft.lose(samples, "with --use_dynamic_batch passes are filled with tokens, in OpenRLHF too")
            continue
        draft.lose(tokens, "OpenRLHF reads it with --use_dynamic_batch only")
        if samples in draft.options:
            draft.set(ours, draft.value(samples) * _longest(draft))
            draft.change(samples, "passes are filled up to as many tokens as that many of the longest samples have")
    if "rollout.tasks_per_gpu" in draft.options:
        gpus = draft.value("vllm.num_engines", 1) * draft.value("vllm.tensor_parallel_size", 1)
        draft.set("rollout.max_concurrent", draft.value("rollout.tasks_per_gpu") * gpus)


def _longest(draft: RLDraft) -> int:
    """Returns the tokens of the longest sample."""
    total = draft.value("data.max_len")
    if total is not None:
        return int(total)
    prompt, reply = draft.value("data.prompt_max_len"), draft.value("rollout.max_new_tokens")
    return int(PROMPT_TOKENS if prompt is None else prompt) + int(PROMPT_TOKENS if reply is None else reply)


IMAGES = {
    "data.image_key": "data.image_key",
    "data.max_images_per_prompt": "data.max_images_per_prompt",
    "actor.freeze_visual_encoder": "actor.freeze_visual_encoder",
}


def translate_images(draft: RLDraft) -> None:
    """Sets where images are.

    Raises:
        ConfigurationError: a value is not of its flag's kind.
    """
    if not draft.value("data.apply_chat_template", False):
        why: str | None = "images are put where the chat template has them: --apply_chat_template"
    else:
        why = None if "data.image_key" in draft.options else "no images are read without --data.image_key"
    for name, ours in IMAGES.items():
        if why is not None and draft.asks(name):
            draft.lose(name, why)
        elif why is None and draft.asks(name):
            draft.set(ours, draft.value(name))


def _overlap(draft: RLDraft, prompts: int) -> None:
    """Translates the overlap of rollouts with each other and with training."""
    in_flight = draft.value("rollout.vllm_generate_batch_size", prompts)
    overlaps = draft.value("train.async_enable", False)
    if overlaps:
        ahead = draft.value("train.async_queue_size", 1)
        draft.set("train.async_enable", True)
        draft.set("train.max_staleness", ahead)
        if draft.value("train.partial_rollout_enable", False):
            draft.set("train.partial_rollout", "keep")
        corrected = (
            "" if draft.corrects else "; stale samples are corrected (algo.correction.level auto), there only if asked"
        )
        draft.change("train.async_enable", f"an update waits for its own groups only, not for a whole batch{corrected}")
        most = prompts * (ahead + 1)
        if in_flight > most:
            draft.change("rollout.vllm_generate_batch_size", f"{most}, for no more can be trained on in time")
            in_flight = most
    else:
        for key in ("async_queue_size", "partial_rollout_enable"):
            draft.lose(f"train.{key}", "OpenRLHF reads it with --async_train only")
    if in_flight > prompts and overlaps:
        draft.set("rollout.generate_batch_size", in_flight)
    elif in_flight > prompts and draft.corrects:
        draft.set("rollout.generate_batch_size", in_flight)
        draft.change("rollout.vllm_generate_batch_size", "a rollout does not wait for the groups that it can spare")
    elif in_flight != prompts:
        needs = "over-sampling needs --enable_vllm_is_correction" if in_flight > prompts else "a rollout needs more"
        draft.lose("rollout.vllm_generate_batch_size", needs)


def _lengths(draft: RLDraft) -> None:
    total = draft.value("data.max_len")
    prompt, reply = draft.value("data.prompt_max_len"), draft.value("rollout.max_new_tokens")
    dropped = "is dropped before the first step here (--data.overlong error refuses it), while OpenRLHF cuts it"
    if total is None:
        draft.set("data.max_prompt_tokens", PROMPT_TOKENS if prompt is None else prompt)
    else:
        draft.set("data.max_len", total)
        draft.change("data.max_len", f"a prompt that leaves no token for the reply {dropped}")
        if prompt is not None and prompt < total:
            draft.set("data.max_prompt_tokens", prompt)
        reply = total if reply is None else reply  # the tokens that the prompt leaves
    draft.set("rollout.max_new_tokens", PROMPT_TOKENS if reply is None else reply)
    draft.change("data.prompt_max_len", f"a longer prompt {dropped}")


# Rewards, data and evaluation.


def _reward(draft: RLDraft) -> None:
    url = draft.value("reward.remote_url")
    if url is not None and url.endswith(".py"):
        draft.set("reward.function_path", url)
    elif url is not None:
        draft.set("reward.remote_url", url)
        draft.set("reward.timeout", REWARD_TIMEOUT)
        draft.change(
            "reward.remote_url", "replies are sent in batches of reward.remote_batch_size, in OpenRLHF one by one"
        )
    _reward_model(draft)
    if draft.value("reward.normalize_enable", False):
        _normalize(draft)
    draft.set("reward.clip_range", draft.value("reward.clip_range", [-10.0, 10.0]))
    if "group" in draft.traits.needs:
        draft.change("reward.clip_range", "rewards are clipped before the group's baseline, in OpenRLHF after it")
    if draft.value("reward.overlong_buffer_len") is None:
        draft.lose("reward.overlong_penalty_factor", "there is no length penalty without --overlong_buffer_len")
    else:
        draft.set("reward.overlong_penalty_factor", draft.value("reward.overlong_penalty_factor", 1.0))
        if "train.agent_func_path" in draft.options:
            limit = draft.value("data.max_len")
            if limit is None:
                limit = 2 * PROMPT_TOKENS
                draft.set("rollout.max_episode_tokens", limit)
            draft.change(
                "reward.overlong_buffer_len",
                f"sampled tokens count against the {limit} of an episode, in OpenRLHF all tokens after the prompt "
                "against those of a reply",
            )


def _normalize(draft: RLDraft) -> None:
    if draft.reward_model is None:
        draft.lose("reward.normalize_enable", "OpenRLHF too does so for reward models only")
        return
    draft.set("reward.normalize", "model")
    if draft.has_critic:
        draft.change("reward.normalize_enable", "rewards alone are scaled, in OpenRLHF the critic's values too")


def _reward_model(draft: RLDraft) -> None:
    model = draft.reward_model
    if model is None:
        draft.lose("reward.model_name_or_path", "--remote_rm_url or --agent_func_path replaces it")
        return
    draft.set("reward.model_name_or_path", model)
    draft.set("reward.timeout", REWARD_TIMEOUT)
    if model != draft.value("reward.model_name_or_path"):
        draft.change("reward.model_name_or_path", f"{model} alone, for a run has one reward model")


def _evaluation(draft: RLDraft) -> None:
    dataset = draft.value("eval.dataset")
    if not dataset:
        if draft.asks("ckpt.best_metric_key"):
            draft.lose("ckpt.best_metric_key", "there is nothing to evaluate on without --eval_dataset")
        for key in ("split", "temperature", "n_samples_per_prompt", "steps"):
            if key != "steps" or draft.value("eval.steps", -1) != -1:
                draft.lose(f"eval.{key}", "there is nothing to evaluate on without --eval_dataset")
        return
    steps, temperature = draft.value("eval.steps", -1), draft.value("eval.temperature", 0.6)
    samples = draft.value("eval.n_samples_per_prompt", 4)
    if temperature == 0 and samples > 1:
        draft.change("eval.temperature", "one sample of each prompt, for greedy samples are all alike")
        samples = 1
    if steps == -1:
        draft.change("eval.dataset", "evaluates before and after training, in OpenRLHF never without --eval_steps")
    else:
        draft.change("eval.steps", "evaluates before and after training as well")
    for key, value in {
        "dataset": dataset,
        "split": draft.value("eval.split", "train"),
        "steps": steps,
        "temperature": temperature,
        "n_samples_per_prompt": samples,
        "max_samples": draft.value("data.max_samples"),
    }.items():
        draft.set(f"eval.{key}", value)
    if temperature:
        draft.set("eval.top_p", draft.value("rollout.top_p", 1.0))
    _best(draft, samples)


def _best(draft: RLDraft, samples: int) -> None:
    """Translates the metric by which the best model is kept."""
    if not draft.asks("ckpt.best_metric_key"):
        return
    name = draft.value("ckpt.best_metric_key") or "pass1"
    found = re.fullmatch(r"(?:eval_)?(?:.+_)?pass(\d+)", name)
    k = int(found[1]) if found else 0
    if k == samples or (0 < k < samples and k & (k - 1) == 0):
        draft.set("ckpt.best_metric", f"eval/pass@{k}")
        draft.change("ckpt.best_metric_key", f"eval/pass@{k}, over all datasets of the evaluation")
    else:
        draft.lose("ckpt.best_metric_key", f"--ckpt.best_metric takes a metric of ours, such as eval/pass@{samples}")
