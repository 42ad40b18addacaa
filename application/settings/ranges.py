"""The values each setting may take on its own: `RANGES[dotted name]` is a test and the rule in words.

Settings that are None pass. Rules across settings are in `application.validation`.
"""

from collections.abc import Callable
from typing import Any

Range = tuple[Callable[[Any], bool], str]

COUNT: Range = (lambda value: value >= 1, "at least 1")
NOT_NEGATIVE: Range = (lambda value: value >= 0, "at least 0")
POSITIVE: Range = (lambda value: value > 0, "greater than 0")
SHARE: Range = (lambda value: 0 <= value <= 1, "from 0 to 1")
BELOW_ONE: Range = (lambda value: 0 <= value < 1, "at least 0 and below 1")
PERIOD: Range = (lambda value: value == -1 or value >= 1, "-1 or at least 1")
INTERVAL: Range = (lambda value: value[0] < value[1], "two numbers, the lower one first")

RANGES: dict[str, Range] = {
    **{
        f"{model}.{key}": bounds
        for model in ("actor", "critic")
        for key, bounds in {
            "adam.lr": NOT_NEGATIVE,
            "adam.betas": (lambda betas: all(0 <= beta < 1 for beta in betas), "two numbers at least 0 and below 1"),
            "adam.eps": POSITIVE,
            "adam.weight_decay": NOT_NEGATIVE,
            "muon.lr": NOT_NEGATIVE,
            "muon.momentum": BELOW_ONE,
            "lr_warmup_ratio": BELOW_ONE,
            "min_lr_ratio": SHARE,
            "max_norm": NOT_NEGATIVE,
        }.items()
    },
    "actor.lora.rank": NOT_NEGATIVE,
    "actor.lora.alpha": POSITIVE,
    "actor.lora.target_modules": (lambda names: bool(names) and all(names), "at least one name, and none empty"),
    "actor.eps_clip": SHARE,
    "actor.eps_clip_low_high": (
        lambda clip: 0 <= clip[0] <= 1 and clip[1] >= 0,
        "a lower range from 0 to 1, and an upper range at least 0",
    ),
    "actor.sapo_tau": (lambda tau: min(tau) > 0, "two numbers greater than 0"),
    "actor.cov_share": (lambda share: 0 < share <= 1, "greater than 0 and at most 1"),
    "actor.cov_range": INTERVAL,
    "actor.cov_kl_coef": NOT_NEGATIVE,
    "actor.entropy_target": POSITIVE,
    "actor.entropy_coef_step": POSITIVE,
    "actor.positive_nll_coef": NOT_NEGATIVE,
    "actor.aux_loss_coef": NOT_NEGATIVE,
    "actor.dual_clip": (lambda value: value > 1, "greater than 1"),
    "actor.entropy_coef": NOT_NEGATIVE,
    "critic.value_clip": POSITIVE,
    "critic.freezing_steps": NOT_NEGATIVE,
    "agent.attempts": COUNT,
    "algo.advantage.gamma": SHARE,
    "algo.advantage.lambd": SHARE,
    "algo.advantage.critic_lambd": SHARE,
    "algo.advantage.length_adaptive_alpha": POSITIVE,
    "algo.correction.low": NOT_NEGATIVE,
    "algo.correction.high": POSITIVE,
    "algo.correction.threshold": POSITIVE,
    "algo.dynamic_filtering_range": INTERVAL,
    "algo.dynamic_filtering_budget": (lambda budget: budget >= 1, "at least 1"),
    "algo.kl.init_coef": NOT_NEGATIVE,
    "algo.kl.target": POSITIVE,
    "algo.kl.horizon": POSITIVE,
    **{
        f"{model}.{key}": COUNT
        for model in ("actor", "critic", "ref", "reward")
        for key in ("num_nodes", "num_gpus_per_node")
    },
    "cluster.timeout": POSITIVE,
    "ds.zero_stage": (lambda stage: 0 <= stage <= 3, "0, 1, 2 or 3"),
    "ds.sequence_parallel_size": COUNT,
    "ds.tensor_parallel_size": COUNT,
    "vllm.num_engines": COUNT,
    "vllm.tensor_parallel_size": COUNT,
    "vllm.pipeline_parallel_size": COUNT,
    "vllm.max_model_len": COUNT,
    "vllm.gpu_memory_utilization": (lambda share: 0 < share <= 1, "greater than 0 and at most 1"),
    "rollout.batch_size": COUNT,
    "rollout.n_samples_per_prompt": COUNT,
    "rollout.generate_batch_size": COUNT,
    "rollout.temperature": (
        POSITIVE[0],
        "greater than 0, for greedy samples carry no probability to learn from",
    ),
    "rollout.top_p": (lambda value: 0 < value <= 1, "greater than 0 and at most 1"),
    "rollout.top_k": NOT_NEGATIVE,
    "rollout.max_new_tokens": COUNT,
    "rollout.max_turns": COUNT,
    "rollout.max_episode_tokens": COUNT,
    "rollout.max_episode_seconds": POSITIVE,
    "rollout.stop_strings": (all, "texts that are not empty"),
    "rollout.max_concurrent": COUNT,
    "rollout.max_failures": NOT_NEGATIVE,
    "rollout.max_batch_size": COUNT,
    "train.max_steps": COUNT,
    "train.num_episodes": COUNT,
    "train.batch_size": COUNT,
    "train.max_epochs": COUNT,
    "train.max_staleness": NOT_NEGATIVE,
    "train.max_tokens_per_micro_batch": COUNT,
    "train.ema_beta": BELOW_ONE,
    "train.seed": NOT_NEGATIVE,
    "data.max_prompt_tokens": COUNT,
    "data.max_len": (lambda tokens: tokens >= 2, "at least 2, for a prompt and a reply"),
    "data.max_samples": COUNT,
    "data.size": COUNT,
    "reward.timeout": POSITIVE,
    "reward.remote_batch_size": COUNT,
    "reward.clip_range": INTERVAL,
    "reward.judge_range": INTERVAL,
    "reward.normalize_mean_std": (lambda pair: pair[1] > 0, "a mean, and a standard deviation greater than 0"),
    "reward.overlong_buffer_len": COUNT,
    "reward.overlong_penalty_factor": POSITIVE,
    "reward.stop_properly_penalty_coef": (lambda coef: coef <= 1, "at most 1"),
    "data.curriculum_range": INTERVAL,
    "eval.steps": PERIOD,
    "eval.temperature": NOT_NEGATIVE,
    "eval.n_samples_per_prompt": COUNT,
    "eval.max_new_tokens": COUNT,
    "eval.max_samples": COUNT,
    "ckpt.output_dir": (bool, "a directory"),
    "ckpt.save_steps": PERIOD,
    "ckpt.state_minutes": POSITIVE,
    "ckpt.state_steps": PERIOD,
    "ckpt.keep_states": COUNT,
    "ckpt.keep_models": COUNT,
    "logger.log_samples": NOT_NEGATIVE,
}
