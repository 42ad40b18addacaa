import re
from enum import Enum
from operator import attrgetter
from typing import Any

import pytest
from attrs import evolve, fields

from rollgrad.application.settings.derived import longest_sample, longest_sequence, optimizer_steps_per_rollout
from rollgrad.application.settings.rules import validate, validate_evaluation
from rollgrad.application.settings.rules.inputs import dataset_names
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig, Checkpointing, RouterReplay
from rollgrad.application.settings.sections.agent import PythonIsolation
from rollgrad.application.settings.sections.data import Overlong
from rollgrad.application.settings.sections.examples import ExampleModelConfig
from rollgrad.application.settings.sections.optimizer import LRScheduler, Optim
from rollgrad.application.settings.sections.reward import JudgeIsolation, Verifier
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.train import PartialRollout
from rollgrad.application.settings.validation import condition_problems, leaves
from rollgrad.domain.algorithms.settings import (
    CorrectionGate,
    CorrectionLevel,
    CorrectionMode,
    KLAgainst,
    KLEstimator,
    OldLogprobs,
    Whiten,
)
from rollgrad.domain.algorithms.shaping_settings import Normalise
from rollgrad.domain.control.staleness import StalenessUnit, StalePolicy
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import FREE
from rollgrad.entrypoints.cli.parsing import TrainArguments, flag_kinds, parse_run
from tests.flags import example

RANGES = [name for name, _, told in leaves(RLConfig()) if told.range is not None]
VALID: dict[str, Any] = {
    "actor.model_name_or_path": "model",
    "data.prompt_dataset": "prompts.jsonl",
    "data.label_key": "label",
    "reward.verifier": Verifier.LAST_NUMBER,
}
GROUPS: dict[str, Any] = {"rollout.n_samples_per_prompt": 2}
FILTER: dict[str, Any] = {"algo.dynamic_filtering_enable": True}
CENTRED: dict[str, Any] = {"algo.score_centering_top_k": 128}
TIS: dict[str, Any] = {"algo.correction.level": CorrectionLevel.TOKEN}
NO_CORRECTION: dict[str, Any] = {"algo.correction.level": CorrectionLevel.OFF}
ASYNC: dict[str, Any] = {"train.async_enable": True}
OVERLAP: dict[str, Any] = {
    "stale_policy": StalePolicy.DROP,
    "staleness_unit": StalenessUnit.TOKEN,
    "partial_rollout": PartialRollout.RECOMPUTE,
}
JUDGED = {"reward.judge_url": "http://a/v1", "reward.judge_model": "m", "reward.judge_prompt": "judge.txt"}
DISTILL: dict[str, Any] = {
    "algo.advantage.estimator": "on_policy_distill",
    "algo.kl.init_coef": 1.0,
    "ref.model_name_or_path": "teacher",
}
WHOLE_KL: dict[str, Any] = {"algo.kl.use_loss": True, "algo.kl.estimator": KLEstimator.FULL}
KL_TO_ROLLOUT: dict[str, Any] = {
    "algo.kl.init_coef": 0.1,
    "algo.kl.use_loss": True,
    "algo.kl.estimator": KLEstimator.K2,
    "algo.kl.against": KLAgainst.ROLLOUT,
}
SERVED: dict[str, Any] = {"algo.kl.init_coef": 0.1, "ref.url": "http://host:8000"}
MOVING: dict[str, Any] = {"algo.kl.init_coef": 0.1, "algo.kl.ref_sync_steps": 8}
TOOLS: dict[str, Any] = {"agent.tools": "think"}
TOLD: dict[str, Any] = {"algo.kl.teacher_template": "{prompt} {label}"}
GDPO: dict[str, Any] = {"algo.advantage.estimator": "gdpo"} | GROUPS
MAXRL: dict[str, Any] = {"algo.advantage.estimator": "maxrl"} | GROUPS
VLLM: dict[str, Any] = {"rollout.engine": Engine.VLLM}
GYM = "reasoning_gym:basic_arithmetic"


def configured(settings: dict[str, Any]) -> RLConfig:
    config = RLConfig()
    for key, value in {**VALID, **settings}.items():
        *sections, name = key.split(".")
        setattr(attrgetter(".".join(sections))(config), name, value)
    return config


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algo.advantage.estimator": "reinforce", "algo.advantage.gamma": 0.9},
        *(
            {"algo.advantage.estimator": estimator, "rollout.n_samples_per_prompt": 2}
            for estimator in (
                "reinforce_baseline",
                "rloo",
                "group_norm",
                "dr_grpo",
            )
        ),
        {"algo.advantage.gamma": 0.99, "algo.advantage.lambd": 0.95, "algo.advantage.no_std_norm": True},
        {"critic.value_clip": None, "critic.adam.lr": 1e-5},
        {"algo.kl.init_coef": 0.1, "algo.kl.target": 0.05, "algo.kl.horizon": 100.0, "ref.model_name_or_path": "r"},
        {"algo.kl.init_coef": 0.1, "algo.kl.use_loss": True, "algo.kl.estimator": KLEstimator.K3},
        {"train.batch_size": 64, "algo.old_logprobs": OldLogprobs.ROLLOUT},
        {"train.max_epochs": 2, "algo.old_logprobs": OldLogprobs.ROLLOUT},
        {"train.batch_size": 64, "rollout.top_p": 0.9, "rollout.top_k": 20},
        {"actor.lr_scheduler": LRScheduler.LINEAR, "actor.min_lr_ratio": 0.0},
        {"train.enable_ema": True, "train.ema_beta": 0.9},
        {"actor.optim": Optim.MUON, "actor.muon.lr": 1e-4, "critic.optim": Optim.MUON, "critic.adam.lr": 1e-5},
        {"actor.eps_clip_low_high": (0.2, 0.28), "actor.dual_clip": 3.0},
        {"data.prompt_dataset": GYM, "data.size": 50, "reward.verifier": None, "data.label_key": None},
        {"data.prompt_dataset": "a.jsonl,b.jsonl", "data.prompt_probs": (0.3, 0.7)},
        {"data.prompt_split": "train[:90%]", "eval.dataset": "a.jsonl", "eval.split": "train[90%:]"},
        {"reward.verifier": Verifier.FORMAT, "reward.format_pattern": "<a>.*</a>", "data.label_key": None},
        {"reward.verifier": Verifier.MATH, "reward.isolation": JudgeIsolation.NONE},
        {"agent.tools": "think, python", "agent.python_isolation": PythonIsolation.NONE},
        {"reward.verifier": None, "reward.function_path": "reward.py", "data.label_key": None},
        {"data.apply_chat_template": False, "data.input_template": "Q: {}\nA:"},
        {"data.system_prompt": "Be brief."},
        {"data.label_key": None},
        {"data.max_len": 100, "data.max_prompt_tokens": 99, "data.overlong": Overlong.ERROR},
        {"data.chat_template": "{{ messages }}", "data.chat_template_kwargs": {"enable_thinking": False}},
        {"algo.advantage.lambd": 0.95, "algo.advantage.critic_lambd": 1.0},
        {"algo.advantage.length_adaptive_alpha": 0.05, "critic.freezing_steps": 5},
        {"algo.advantage.estimator": "turn_gae", "algo.advantage.gamma": 0.9, "agent.attempts": 2},
        GROUPS | {"algo.advantage.estimator": "gigpo", "algo.advantage.step_weight": 0.5, "agent.attempts": 2},
        GROUPS | {"algo.advantage.estimator": "gigpo", "algo.advantage.no_std_norm": True, "agent.attempts": 2},
        {"algo.advantage.estimator": "rloo", "algo.advantage.whiten": Whiten.GROUP, "algo.advantage.no_std_norm": True}
        | GROUPS,
        {"algo.advantage.estimator": "remax", "reward.clip_range": (0.0, 1.0)},
        {"algo.advantage.estimator": "flash_reinforce"},
        DISTILL,
        DISTILL | {"reward.verifier": None},
        DISTILL | WHOLE_KL,
        {**DISTILL, "ref.model_name_or_path": None, "algo.kl.teacher_template": "{prompt} {label}"},
        {**DISTILL, "reward.verifier": None},
        {**DISTILL, "ref.model_name_or_path": None, "algo.kl.teacher_template": "{prompt}"} | WHOLE_KL,
        GROUPS | {"algo.advantage.estimator": "rloo", "algo.kl.init_coef": 0.1, "algo.kl.teacher_template": "t.txt"},
        {"actor.policy_loss_type": "policy_gradient", "algo.old_logprobs": OldLogprobs.ROLLOUT},
        {"actor.policy_loss_type": "policy_gradient"} | ASYNC,
        DISTILL | {"algo.advantage.estimator": "iw_opd", "algo.advantage.prefix_weight": 1.0},
        {"algo.kl.init_coef": 0.1, **WHOLE_KL, "algo.kl.top_k": 8, "algo.kl.beta": 0.5},
        {"algo.old_logprobs": OldLogprobs.ROLLOUT},
        {"actor.router_replay": RouterReplay.ENGINE, "algo.old_logprobs": OldLogprobs.ROLLOUT},
        {"actor.router_replay": RouterReplay.TRAINER, "rollout.engine": Engine.VLLM, "train.batch_size": 64},
        {"actor.policy_loss_type": "gspo", "actor.eps_clip": 1e-3},
        {"actor.policy_loss_type": "sapo", "actor.sapo_tau": (1.0, 2.0)},
        {"actor.policy_loss_type": "vespo", "actor.vespo_k": (0.0, 2.0), "actor.vespo_lambda": (0.5, 1.0)},
        {"actor.policy_loss_type": "dro", "actor.dro_beta": 1.0},
        CENTRED,
        CENTRED | {"algo.top_entropy_quantile": 0.2, "algo.old_logprobs": OldLogprobs.RECOMPUTE},
        CENTRED | TIS | {"rollout.engine": Engine.VLLM, "actor.policy_loss_type": "policy_gradient"},
        CENTRED | ASYNC | NO_CORRECTION | {"train.max_staleness": 2},
        TIS | {"algo.correction.gate": CorrectionGate.SECOND_MOMENT, "algo.correction.threshold": 0.04},
        {"actor.policy_loss_type": "clip_cov", "actor.cov_range": (1.0, 2.0), "actor.cov_share": 0.1},
        {"actor.entropy_target": 0.3, "actor.entropy_coef_step": 0.01},
        {"algo.kl.init_coef": 0.1, "algo.kl.use_loss": True, "algo.kl.estimator": KLEstimator.K3_UNBIASED},
        KL_TO_ROLLOUT,
        TIS,
        {"algo.correction.level": CorrectionLevel.SEQUENCE, "algo.correction.mode": CorrectionMode.MASK}
        | {"algo.correction.gate": CorrectionGate.BINARY_KL, "algo.correction.threshold": 0.01},
        TIS | {"rollout.generate_batch_size": 256},
        ASYNC,
        ASYNC | NO_CORRECTION,
        ASYNC | {"rollout.top_p": 0.9},
        ASYNC | {"train.max_staleness": 2},
        ASYNC | {"algo.correction.high": 3.0},
        {"rollout.generate_batch_size": 256},
        ASYNC | {"train.max_staleness": 0},
        ASYNC | TIS | {"train.max_staleness": 4, "rollout.generate_batch_size": 640, "ckpt.state_steps": 1},
        ASYNC | {"train.max_staleness": 2, "algo.old_logprobs": OldLogprobs.INTERPOLATE},
        ASYNC | {"rollout.generate_batch_size": 256, "train.partial_rollout": PartialRollout.KEEP},
        ASYNC | {"train.stale_policy": StalePolicy.DROP, "train.staleness_unit": StalenessUnit.TOKEN},
        {"algo.old_logprobs": OldLogprobs.INTERPOLATE, "rollout.generate_batch_size": 256},
        FILTER | GROUPS | {"algo.dynamic_filtering_range": (0.1, 0.9), "algo.dynamic_filtering_budget": 3.0},
        {"algo.dynamic_filtering_spread": True} | GROUPS,
        {"reward.normalize": Normalise.DATASET, "reward.normalize_mean_std": (0.5, 2.0)},
        {"reward.overlong_buffer_len": 100, "reward.overlong_penalty_factor": 0.5, "algo.mask_truncated": True},
        {"algo.mask_repetition": 500, "rollout.max_new_tokens": 1000},
        GROUPS | {"reward.majority_vote": True},
        GROUPS | {"reward.majority_vote": True, "reward.verifier": None, "reward.function_path": "r.py"},
        {"reward.cosine_length": True, "reward.cosine_exceeded": -1.0, "reward.stop_properly_penalty_coef": 0.5},
        GROUPS | {"reward.group_length_coef": 0.1, "reward.overlong_buffer_len": 100},
        TOOLS | {"reward.overlong_buffer_len": 2000, "rollout.max_episode_tokens": 4000},
        TOOLS | {"reward.cosine_length": True, "rollout.max_episode_tokens": 4000},
        GDPO,
        MAXRL | {"reward.clip_range": (-1.0, 1.0), "reward.stop_properly_penalty_coef": 0.5},
        MAXRL
        | {"reward.normalize": Normalise.RUNNING, "reward.overlong_buffer_len": 20, "reward.clip_range": (0.0, 1.0)},
        MAXRL | {"reward.cosine_length": True, "reward.cosine_failed": (0.0, 0.5), "reward.cosine_exceeded": 0.0},
        VLLM | {"vllm.max_model_len": 2048},
        VLLM | TOOLS | {"vllm.max_model_len": 8192, "rollout.max_episode_tokens": 8192},
        {"reward.verifier": None, "reward.function_path": "r.py", "reward.weights": {"a": 1.0}},
        {"reward.verifier": None, "reward.model_name_or_path": "rm", "data.label_key": None},
        {"reward.verifier": None, "reward.model_name_or_path": "rm", "reward.normalize": Normalise.MODEL},
        {"reward.verifier": None, "reward.remote_url": "http://a,http://b", "reward.failure_value": 0.0},
        {"reward.verifier": None, **JUDGED, "reward.judge_range": (0.0, 10.0), "data.label_key": None},
        {"reward.verifier": None, **JUDGED, "reward.judge_range": (0.0, 1.0), "reward.judge_rubric_key": "rubric"},
        {"train.agent_func_path": "agent.py"},
        {"eval.dataset": "e.jsonl", "eval.n_samples_per_prompt": 4, "eval.temperature": 0.7, "eval.steps": 5},
    ],
)
def test_settings_that_fit_together_are_allowed(settings: dict[str, Any]) -> None:
    validate(configured(settings))


WIDE_CLUSTER: dict[str, Any] = {"cluster.enable": True, "actor.num_gpus_per_node": 4, "ds.sequence_parallel_size": 2}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"actor.model_name_or_path": ""}, "--actor.model_name_or_path"),
    ({"data.prompt_dataset": ""}, "--data.prompt_dataset"),
    *(
        ({"algo.advantage.estimator": estimator}, "is 1: set --rollout.n_samples_per_prompt")
        for estimator in ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")
    ),
    *(
        (
            {
                "algo.advantage.estimator": estimator,
                f"algo.advantage.{key}": value,
                "rollout.n_samples_per_prompt": 2,
            },
            f"the {estimator} estimator does not use: leave --algo.advantage.{key} out",
        )
        for estimator, key, value in (
            ("reinforce_baseline", "gamma", 0.9),
            ("rloo", "gamma", 0.9),
            ("group_norm", "gamma", 0.9),
            ("dr_grpo", "gamma", 0.9),
            ("reinforce", "lambd", 0.9),
        )
    ),
    ({"algo.advantage.estimator": "reinforce", "critic.value_clip": 0.2}, "leave --critic.value_clip out"),
    ({"algo.advantage.estimator": "reinforce", "critic.adam.lr": 1e-3}, "leave --critic.adam.lr out"),
    ({"ref.model_name_or_path": "r"}, "--ref.model_name_or_path out"),
    ({"algo.kl.target": 0.1}, "--algo.kl.target out"),
    ({"algo.kl.use_loss": True}, "--algo.kl.use_loss out"),
    ({"algo.kl.estimator": KLEstimator.K2}, "--algo.kl.estimator out"),
    ({"algo.kl.init_coef": 0.1, "algo.kl.horizon": 5.0}, "set --algo.kl.target"),
    ({"algo.kl.init_coef": 0.1, "algo.kl.use_loss": True}, "--algo.kl.estimator to k2, k3, k3_unbiased, abs or full"),
    ({"ckpt.output_dir": "s3://bucket/run"}, "a directory of this machine"),
    ({"ckpt.state_dir": "gs://bucket/run"}, "change --ckpt.state_dir"),
    ({"ckpt.state_dir": "a\0b"}, "change --ckpt.state_dir"),
    ({"ckpt.best_metric": "pass@1", "eval.dataset": "rows.jsonl"}, "begin with eval/"),
    (
        {"ckpt.best_metric": "eval/pass@3", "eval.dataset": "rows.jsonl", "eval.n_samples_per_prompt": 4},
        "but evaluations give eval/pass@1, eval/pass@2, eval/pass@4, eval/mean@4, eval/best@2, eval/best@4, "
        "eval/maj@4, eval/failed",
    ),
    ({"ckpt.best_metric": "eval/math/failed", "eval.dataset": "rows.jsonl"}, "eval/NAME/pass@1 and the like of each"),
    ({"ckpt.best_metric": "eval//pass@1", "eval.dataset": "rows.jsonl"}, "set --ckpt.best_metric to one of them"),
    ({"ckpt.early_stopping_patience": 2}, "set --ckpt.best_metric"),
    (
        {"ckpt.early_stopping_patience": 2, "ckpt.best_metric": "eval/pass@1", "eval.dataset": "rows.jsonl"},
        "no evaluation before the end: set --eval.steps",
    ),
    ({"actor.min_lr_ratio": 0.2}, "--actor.lr_scheduler"),
    ({"train.ema_beta": 0.9}, "set --train.enable_ema"),
    ({"actor.muon.lr": 0.1}, "set --actor.optim muon"),
    ({"critic.muon.momentum": 0.5, "algo.advantage.estimator": "gae"}, "leave --critic.muon.momentum out"),
    ({"critic.min_lr_ratio": 0.2}, "--critic.lr_scheduler"),
    ({"actor.lora.dora": True}, "set --actor.lora.rank above 0"),
    (
        {"actor.lora.dora": True, "actor.lora.rank": 4, "actor.lora.dropout": 0.1},
        "leave these out, or leave --actor.lora.dora",
    ),
    ({"actor.lora.dora": True, "actor.lora.rank": 4, "actor.lora.load_in_4bit": True}, "weights in 4 bits"),
    ({"actor.lora.dora": True, "actor.lora.rank": 4, "cluster.enable": True}, "DoRA is computed in one process"),
    ({"actor.lr_scheduler": LRScheduler.LINEAR, "actor.lr_decay_ratio": 0.2}, "set --actor.lr_scheduler warmup_stable"),
    ({"actor.eps_clip": 0.1, "actor.eps_clip_low_high": (0.2, 0.28)}, "leave --actor.eps_clip out"),
    ({"train.max_steps": 3, "train.num_episodes": 2}, "--train.num_episodes"),
    ({"train.batch_size": 129}, "128 prompts x 1 samples = 128"),
    ({"algo.old_logprobs": OldLogprobs.ROLLOUT, "train.batch_size": 64, "rollout.top_p": 0.9}, "truncated"),
    ({"algo.old_logprobs": OldLogprobs.ROLLOUT, "train.max_epochs": 2, "rollout.top_k": 5}, "truncated"),
    (
        {
            "algo.old_logprobs": OldLogprobs.ROLLOUT,
            "train.max_epochs": 2,
            "actor.lora.rank": 8,
            "actor.lora.dropout": 0.1,
        },
        "leave one of --algo.old_logprobs and --actor.lora.dropout out",
    ),
    (
        {
            "actor.router_replay": RouterReplay.ENGINE,
            "rollout.engine": Engine.SERVER,
            "rollout.server_urls": ("http://127.0.0.1:8000",),
        },
        "set --actor.router_replay trainer, or --rollout.engine vllm",
    ),
    (
        {
            "actor.router_replay": RouterReplay.ENGINE,
            "rollout.engine": Engine.VLLM,
            "vllm.pipeline_parallel_size": 2,
        },
        "set --vllm.tensor_parallel_size instead",
    ),
    (
        {"actor.router_replay": RouterReplay.TRAINER, "algo.old_logprobs": OldLogprobs.ROLLOUT},
        "leave one of --actor.router_replay and --algo.old_logprobs out",
    ),
    *(
        (
            {"actor.router_replay": replay, "cluster.enable": True, f"ds.{size}": 2, "actor.num_gpus_per_node": 2},
            f"leave one of --actor.router_replay and --ds.{size} out",
        )
        for replay, size in (
            (RouterReplay.ENGINE, "tensor_parallel_size"),
            (RouterReplay.TRAINER, "sequence_parallel_size"),
        )
    ),
    ({"actor.lora.dropout": 0.1}, "set --actor.lora.rank above 0"),
    ({"critic.lora.alpha": 8, "algo.advantage.estimator": "gae"}, "set --critic.lora.rank above 0"),
    (
        {
            "algo.advantage.estimator": "gae",
            "critic.lora.rank": 8,
            "critic.lora.target_modules": ("all-linear", "q_proj"),
        },
        "leave the other names out of --critic.lora.target_modules",
    ),
    ({"critic.lora.rank": 8, "algo.advantage.estimator": "rloo"}, "leave --critic.lora.rank out"),
    ({"rollout.temperature": 0.0}, "greedy"),
    ({"data.prompt_probs": (0.5, 0.5)}, "2 numbers for 1 datasets"),
    ({"data.prompt_dataset": "a,b", "data.prompt_probs": (0.5, 0.6)}, "sum 1.1"),
    ({"data.prompt_dataset": "a,b", "data.prompt_probs": (-0.5, 1.5)}, "greater than 0"),
    ({"data.prompt_dataset": "a,b", "data.prompt_probs": (0.0, 1.0)}, "greater than 0"),
    ({"data.size": 5}, "--data.size"),
    ({"data.apply_chat_template": False, "data.system_prompt": "Be brief."}, "--data.apply_chat_template"),
    ({"data.input_template": "Q: {}"}, "--data.no_apply_chat_template"),
    ({"data.apply_chat_template": False, "data.input_template": "Q:"}, "no {}"),
    (
        {"reward.verifier": None},
        "--reward.remote_url, --reward.judge_url or --reward.verifier",
    ),
    ({"data.prompt_dataset": f"{GYM},a.jsonl", "reward.verifier": None}, "No reward"),
    ({"data.prompt_dataset": GYM, "data.prompt_split": "train[:9]"}, "leave the brackets of --data.prompt_split out"),
    ({"eval.dataset": GYM, "eval.split": "test[:9]"}, "leave the brackets of --eval.split out"),
    ({"data.prompt_split": "train["}, "it must be a name, or one with a slice, as train[:90%]"),
    ({"reward.function_path": "r.py"}, "or say what each counts with --reward.weights r 1 last_number 1"),
    ({"reward.function_path": "r.py", "reward.weights": {"r": 1.0}}, "the rewards are r, last_number: give one weight"),
    (
        {"reward.function_path": "a.py:f,b.py:f", "reward.verifier": None},
        "Two of the rewards f, f are called f: name functions with --reward.function_path FILE:NAME",
    ),
    (
        {**JUDGED, "reward.weights": {"judge": 1.0, "lats_number": 1.0}},
        "names judge, lats_number, but the rewards are judge, last_number: give one weight",
    ),
    ({"reward.function_path": ",", "reward.verifier": None}, "which names no file"),
    (
        {"reward.function_path": "a.py,b.py", "reward.verifier": None, "reward.majority_vote": True},
        "takes the place of every reward, but several are set (a, b): keep the one that says what a reply answers",
    ),
    ({"reward.verifier": Verifier.FORMAT}, "--reward.format_pattern"),
    ({"reward.format_pattern": "a"}, "set --reward.verifier to format"),
    ({"reward.isolation": JudgeIsolation.NONE}, "leave --reward.isolation out"),
    (
        {"agent.tools": "think", "agent.python_isolation": PythonIsolation.NONE},
        "add python to --agent.tools, or leave --agent.python_isolation out",
    ),
    ({"reward.verifier": Verifier.FORMAT, "reward.format_pattern": "("}, "no regular expression"),
    ({"data.max_len": 100, "data.max_prompt_tokens": 100}, "lower --data.max_prompt_tokens"),
    (
        {"data.max_len": 100, "rollout.max_episode_tokens": 90, "train.agent_func_path": "a.py"},
        "leave --rollout.max_episode_tokens or --data.max_len out",
    ),
    ({"data.apply_chat_template": False, "data.chat_template": "x"}, "leave --data.chat_template out"),
    (
        {"data.apply_chat_template": False, "data.chat_template_kwargs": {"enable_thinking": False}},
        "leave --data.chat_template_kwargs out",
    ),
    ({"data.chat_template_kwargs": {"tools": "x"}}, "--data.chat_template_kwargs"),
    ({"algo.advantage.estimator": "grpo2"}, "none of gae"),
    ({"algo.advantage.estimator": "grpo"}, "set --algo.preset grpo"),
    ({"actor.policy_loss_type": "ppo2"}, "none of ppo"),
    ({"algo.preset": "dapo"}, "rollgrad.load_config"),
    ({"algo.advantage.length_adaptive_alpha": 0.05, "algo.advantage.lambd": 0.9}, "--algo.advantage.lambd out"),
    ({"algo.advantage.estimator": "rloo", "algo.advantage.no_std_norm": True} | GROUPS, "not whitened"),
    ({"algo.advantage.estimator": "rloo", "algo.advantage.critic_lambd": 0.9} | GROUPS, "does not use"),
    ({"critic.freezing_steps": 5, "train.max_steps": 5}, "--critic.freezing_steps"),
    ({**DISTILL, "ref.model_name_or_path": None}, "--ref.model_name_or_path"),
    (
        {**DISTILL, "reward.verifier": None, "eval.dataset": "e"},
        "no reward to judge its replies by: name one with --re",
    ),
    ({"algo.kl.teacher_template": "{prompt}"}, "set --algo.kl.init_coef above 0"),
    (DISTILL | TOOLS | TOLD, "episodes have several turns here: leave --algo.kl.teacher_template out"),
    (DISTILL | TOLD | {"data.image_key": "images"}, "--algo.kl.teacher_template or --data.image_key out"),
    (
        GROUPS
        | TOLD
        | {"algo.advantage.estimator": "rloo", "algo.kl.init_coef": 0.1, "algo.kl.use_loss": True}
        | {"algo.kl.estimator": KLEstimator.K3, "algo.kl.against": KLAgainst.ROLLOUT},
        "--algo.kl.against to reference, or leave --algo.kl.teacher_template out",
    ),
    (
        DISTILL | WHOLE_KL | TOLD | {"cluster.enable": True, "ds.sequence_parallel_size": 2},
        "Set --algo.kl.top_k (64, say), leave --ds.sequence_parallel_size out",
    ),
    (DISTILL | {"algo.kl.estimator": KLEstimator.K2}, "teacher"),
    (DISTILL | {"algo.kl.estimator": KLEstimator.FULL}, "turn on --algo.kl.use_loss"),
    (DISTILL | {"algo.kl.top_k": 8}, "set --algo.kl.estimator to full"),
    (DISTILL | {"algo.kl.beta": 0.0}, "set --algo.kl.estimator to full"),
    ({**KL_TO_ROLLOUT, **WHOLE_KL}, "set --algo.kl.against to reference"),
    (
        {"algo.kl.init_coef": 0.1, **WHOLE_KL, "cluster.enable": True, "ref.num_gpus_per_node": 2},
        "leave --ref.num_nodes and --ref.num_gpus_per_node out",
    ),
    ({"algo.kl.ref_sync_steps": 8}, "set --algo.kl.init_coef above 0"),
    ({"algo.kl.init_coef": 0.1, "algo.kl.ref_mixup": 1.0}, "set --algo.kl.ref_sync_steps"),
    (KL_TO_ROLLOUT | MOVING, "leave --algo.kl.ref_sync_steps out"),
    ({"ref.url": "http://host:8000"}, "leave --ref.url out, or set --algo.kl.init_coef above 0"),
    (SERVED | {"ref.url": "host"}, "ref.url is 'host'"),
    (SERVED | {"ref.urls": {"math": "http://a:1", "code": "b"}}, "Of 'code': ref.urls is 'b'"),
    (SERVED | {"ref.urls": {"math": "small@http://a:0"}}, "Of 'math': ref.urls is 'http://a:0', which has port 0"),
    (SERVED | {"ref.urls": {}}, "ref.urls names no server"),
    ({"ref.urls": {"math": "http://a:1"}}, "leave --ref.urls out, or set --algo.kl.init_coef above 0"),
    (SERVED | MOVING, "a server's model does not move"),
    (SERVED | WHOLE_KL, "set --algo.kl.top_k (20, say"),
    (SERVED | {"rollout.temperature": 0.7}, "leave --rollout.temperature or --ref.url out"),
    (SERVED | {"data.image_key": "image"}, "leave --ref.url or --data.image_key out"),
    (SERVED | {"cluster.enable": True, "ref.num_gpus_per_node": 2}, "which are of processes of its own"),
    (MOVING | WHOLE_KL, "compares with a reference that stays"),
    (MOVING | {"ref.model_name_or_path": "r"}, "out, or set --algo.kl.ref_sync_steps None"),
    (MOVING | {"train.enable_ema": True}, "one average of the weights is kept"),
    (MOVING | {"cluster.enable": True, "ref.offload": True}, "--ref.num_gpus_per_node and --ref.offload out"),
    ({"actor.policy_loss_type": "sapo", "actor.eps_clip": 0.1}, "does not clip"),
    ({"actor.policy_loss_type": "gspo", "actor.dual_clip": 3.0}, "--actor.policy_loss_type to ppo"),
    ({"actor.sapo_tau": (1.0, 2.0)}, "--actor.policy_loss_type to sapo"),
    ({"actor.cov_share": 0.1}, "clip_cov or kl_cov"),
    ({"actor.entropy_coef_step": 0.1}, "--actor.entropy_target"),
    ({"algo.kl.init_coef": 0.1, "algo.kl.estimator": KLEstimator.K3_UNBIASED}, "turn on --algo.kl.use_loss"),
    ({"algo.kl.init_coef": 0.1, "algo.kl.against": KLAgainst.ROLLOUT}, "turn on --algo.kl.use_loss"),
    (KL_TO_ROLLOUT | {"ref.model_name_or_path": "r"}, "--ref.model_name_or_path out"),
    ({"algo.correction.mode": CorrectionMode.MASK}, "nothing is corrected"),
    (TIS | {"algo.correction.low": 0.1}, "does not use"),
    (TIS | {"algo.correction.threshold": 0.1}, "does not use"),
    (TIS | {"algo.correction.mode": CorrectionMode.CLIP, "algo.correction.low": 3.0}, "below the upper"),
    (TIS | {"algo.correction.gate": CorrectionGate.OPSM}, "--algo.correction.level to sequence"),
    (
        TIS | {"algo.correction.gate": CorrectionGate.SECOND_MOMENT, "algo.correction.level": CorrectionLevel.SEQUENCE},
        "--algo.correction.level to token",
    ),
    (
        CENTRED | {"actor.policy_loss_type": "gspo"},
        "to one of ppo, cispo, sapo, dppo_tv, dppo_kl, policy_gradient, dro",
    ),
    (
        CENTRED | TIS | {"algo.correction.level": CorrectionLevel.GEOMETRIC},
        "set --algo.correction.level to token or off",
    ),
    (
        CENTRED
        | TIS
        | {
            "algo.correction.mode": CorrectionMode.MASK,
            "algo.correction.gate": CorrectionGate.TV,
        },
        "set --algo.correction.gate to ratio",
    ),
    (CENTRED | {"algo.old_logprobs": OldLogprobs.ROLLOUT}, "set --algo.old_logprobs to recompute"),
    (CENTRED | {"rollout.top_p": 0.9}, "set --rollout.top_p 1 and --rollout.top_k 0"),
    (CENTRED | {"algo.kl.init_coef": 0.1, **WHOLE_KL}, "set --algo.kl.estimator to k2 or k3"),
    (
        CENTRED | {"rollout.engine": Engine.SERVER, "rollout.server_urls": ("http://127.0.0.1:8000",)},
        "set --algo.score_centering_top_k to 19 or less",
    ),
    ({**CENTRED, "algo.advantage.estimator": "optimal_token_baseline"}, "set --algo.advantage.estimator to opo"),
    (
        CENTRED | {"rollout.engine": Engine.VLLM, "vllm.extra": {"max_logprobs": 20}},
        "leave --vllm.extra.max_logprobs out",
    ),
    (
        TIS | {"algo.correction.gate": CorrectionGate.SECOND_MOMENT, "algo.old_logprobs": OldLogprobs.ROLLOUT},
        "--algo.old_logprobs to recompute",
    ),
    (
        {"actor.policy_loss_type": "policy_gradient", "algo.old_logprobs": OldLogprobs.ROLLOUT} | ASYNC,
        "samples of other policies would weigh as if they were the current one's",
    ),
    (
        {"actor.policy_loss_type": "policy_gradient", "algo.old_logprobs": OldLogprobs.ROLLOUT}
        | TIS
        | {"algo.correction.mode": CorrectionMode.MASK},
        "leave --algo.old_logprobs out",
    ),
    *(
        (DISTILL | {f"reward.{key}": value}, f"never sees a reward: leave --reward.{key} out")
        for key, value in {"clip_range": (0.0, 1.0), "overlong_buffer_len": 4, "weights": {"a": 2.0}}.items()
    ),
    ({"algo.advantage.estimator": "turn_gae", "algo.advantage.lambd": 0.9}, "episodes have one turn"),
    ({"actor.vespo_k": (1.0, 2.0)}, "--actor.policy_loss_type to vespo"),
    ({"algo.advantage.prefix_weight": 1.0}, "--algo.advantage.estimator to iw_opd"),
    ({"algo.advantage.pass_k": 3}, "--algo.advantage.estimator to pass_at_k"),
    ({"algo.advantage.step_weight": 0.5}, "--algo.advantage.estimator to gigpo"),
    (GROUPS | {"algo.advantage.estimator": "gigpo"}, "or --algo.advantage.estimator to group_norm"),
    (GROUPS | {"algo.advantage.estimator": "pass_at_k"}, "or lower --algo.advantage.pass_k"),
    (
        DISTILL | WHOLE_KL | {"algo.advantage.estimator": "iw_opd"},
        "set --algo.advantage.estimator to on_policy_distill",
    ),
    ({"actor.dro_beta": 1.0}, "--actor.policy_loss_type to dro"),
    (TIS | {"algo.old_logprobs": OldLogprobs.ROLLOUT}, "--algo.correction.mode to mask"),
    (TIS | {"rollout.top_p": 0.9}, "truncated"),
    (KL_TO_ROLLOUT | {"rollout.top_k": 5}, "truncated"),
    (FILTER, "--rollout.n_samples_per_prompt to 2"),
    ({"algo.dynamic_filtering_range": (0.1, 0.9)}, "--algo.dynamic_filtering_enable"),
    ({"algo.dynamic_filtering_budget": 3.0}, "--algo.dynamic_filtering_enable"),
    ({"rollout.generate_batch_size": 64}, "raise --rollout.generate_batch_size"),
    (NO_CORRECTION | {"rollout.generate_batch_size": 256}, "set --algo.correction.level to auto"),
    ({"rollout.generate_batch_size": 256, "rollout.top_p": 0.9}, "set --rollout.top_p 1 and --rollout.top_k 0"),
    ({"algo.old_logprobs": OldLogprobs.INTERPOLATE}, "--algo.old_logprobs to rollout"),
    *(
        ({f"train.{key}": value}, "turn on --train.async_enable, or")
        for key, value in {"max_staleness": 2, **OVERLAP}.items()
    ),
    *(
        (ASYNC | {"train.max_staleness": 0, f"train.{key}": value}, f"--train.{key} out")
        for key, value in OVERLAP.items()
    ),
    (
        ASYNC | NO_CORRECTION | {"train.max_staleness": 2},
        "more than 1 update old need a correction: set --algo.correction.level to auto",
    ),
    (
        ASYNC | {"train.max_staleness": 2, "rollout.top_k": 5},
        "more than 1 update old need a correction: with rollout.top_p 1.0 and rollout.top_k 5 there is none",
    ),
    (NO_CORRECTION | {"algo.correction.high": 3.0}, "nothing is corrected (algo.correction.level is off)"),
    (
        ASYNC | {"algo.correction.mode": CorrectionMode.MASK, "algo.correction.gate": CorrectionGate.OPSM},
        "algo.correction.level is auto, here token",
    ),
    (ASYNC | {"rollout.generate_batch_size": 257}, "at most 256 groups are in flight: lower"),
    (ASYNC | {"train.max_staleness": 0, "algo.old_logprobs": OldLogprobs.INTERPOLATE}, "nothing between"),
    ({"reward.normalize": Normalise.DATASET}, "--reward.normalize_mean_std"),
    ({"reward.normalize_mean_std": (0.0, 1.0)}, "--reward.normalize dataset"),
    ({"reward.normalize": Normalise.MODEL}, "set --reward.model_name_or_path"),
    ({"reward.overlong_penalty_factor": 0.5}, "--reward.overlong_buffer_len"),
    ({"reward.overlong_buffer_len": 2000}, "at most 1024 tokens"),
    (TOOLS | {"reward.overlong_buffer_len": 20}, "--rollout.max_episode_tokens"),
    (TOOLS | {"reward.cosine_length": True}, "--rollout.max_episode_tokens"),
    ({"reward.group_length_coef": 0.1}, "--rollout.n_samples_per_prompt to 2 or more"),
    (
        GROUPS | {"reward.group_length_coef": 0.1, "reward.cosine_length": True},
        "--reward.group_length_coef or --reward",
    ),
    (
        {"reward.majority_vote": True},
        "--rollout.n_samples_per_prompt to 2 or more, or leave --reward.majority_vote out",
    ),
    (
        GROUPS | {"reward.majority_vote": True, "reward.verifier": None, "reward.remote_url": "http://a"},
        "remote_url http://a does not say what a reply answers",
    ),
    (GROUPS | {"reward.majority_vote": True, "agent.attempts": 2}, "leave --agent.attempts out"),
    (
        GROUPS | {"reward.majority_vote": True, "algo.advantage.estimator": "remax"},
        "a greedy rollout, which has no part in the vote",
    ),
    ({"algo.mask_repetition": 500, "rollout.max_new_tokens": 400}, "lower --algo.mask_repetition, or leave it out"),
    ({"algo.mask_truncated": True, "reward.stop_properly_penalty_coef": 0.5}, "or --algo.mask_truncated out"),
    ({"agent.attempts": 4, "reward.overlong_buffer_len": 20}, "--rollout.max_episode_tokens"),
    ({"agent.command": "agent", "reward.cosine_length": True}, "--rollout.max_episode_tokens"),
    *(
        (GDPO | shaping, f"--{key} out, and return what it is for as one more named reward")
        for shaping, key in (
            ({"reward.cosine_length": True}, "reward.cosine_length"),
            ({"reward.overlong_buffer_len": 20}, "reward.overlong_buffer_len"),
            ({"reward.group_length_coef": 0.1}, "reward.group_length_coef"),
            ({"reward.stop_properly_penalty_coef": 0.0}, "reward.stop_properly_penalty_coef"),
            ({"reward.normalize": Normalise.RUNNING}, "reward.normalize"),
            ({"reward.clip_range": (-1.0, 1.0)}, "reward.clip_range"),
        )
    ),
    *(
        (MAXRL | shaping, "--reward.clip_range with a lower bound of 0")
        for shaping in (
            {"reward.cosine_length": True},
            {"reward.overlong_buffer_len": 20},
            {"reward.group_length_coef": 0.1},
            {"reward.stop_properly_penalty_coef": -0.5},
            {"reward.normalize": Normalise.RUNNING},
            {"reward.normalize": Normalise.DATASET, "reward.normalize_mean_std": (0.5, 1.0)},
            {"reward.normalize": Normalise.RUNNING, "reward.clip_range": (-1.0, 1.0)},
        )
    ),
    (TOOLS | {"reward.overlong_buffer_len": 20, "rollout.max_episode_tokens": 10}, "at most 10 tokens"),
    ({"vllm.max_model_len": 2048}, "--rollout.engine vllm"),
    (VLLM | {"vllm.max_model_len": 2047}, "can ask for 2048 tokens"),
    (VLLM | {"vllm.max_model_len": 2048, "eval.dataset": "e", "eval.max_new_tokens": 1025}, "for 2049 tokens"),
    (VLLM | TOOLS | {"vllm.max_model_len": 100, "rollout.max_episode_tokens": 101}, "for 101 tokens"),
    ({"reward.cosine_exceeded": -1.0}, "--reward.cosine_length"),
    ({"reward.cosine_length": True, "reward.overlong_buffer_len": 10}, "both"),
    ({"algo.advantage.estimator": "remax", "reward.overlong_buffer_len": 10}, "not shaped by length"),
    ({"reward.weights": {"a": 1.0}}, "--reward.weights out"),
    ({"reward.failure_value": 0.0}, "--reward.remote_url"),
    ({"reward.remote_batch_size": 8}, "--reward.remote_url"),
    ({"reward.remote_url": "http://a"}, "both set"),
    (JUDGED, "reward.judge_url 'http://a/v1' and reward.verifier last_number are both set"),
    (
        {"reward.verifier": None, **JUDGED, "reward.judge_model": None},
        "give the name of the model to --reward.judge_model",
    ),
    (
        {"reward.verifier": None, **JUDGED, "reward.judge_prompt": None},
        "a text file with {response} to --reward.judge_p",
    ),
    ({"reward.verifier": None, **JUDGED, "reward.judge_rubric_key": "rubric"}, "set --reward.judge_range"),
    ({"reward.judge_rubric_key": "r"}, "set --reward.judge_url, or leave --reward.judge_rubric_key out"),
    ({"reward.judge_model": "m"}, "set --reward.judge_url, or leave --reward.judge_model out"),
    ({"reward.judge_prompt": "f"}, "set --reward.judge_url, or leave --reward.judge_prompt out"),
    ({"reward.judge_range": (0.0, 1.0)}, "set --reward.judge_url, or leave --reward.judge_range out"),
    (
        {"reward.model_name_or_path": "rm"},
        "reward.model_name_or_path 'rm' and reward.verifier last_number are both set",
    ),
    (
        {"reward.verifier": None, "reward.model_name_or_path": "rm", "reward.weights": {"a": 1.0}},
        "--reward.weights out",
    ),
    (WIDE_CLUSTER | {"ds.sequence_parallel_size": 3}, "does not divide the 4 processes of the model 'actor'"),
    (WIDE_CLUSTER | {"critic.num_gpus_per_node": 3}, "or --critic.num_gpus_per_node"),
    (WIDE_CLUSTER | {"cluster.enable": False}, "--ds.sequence_parallel_size out"),
    ({"ckpt.state_minutes": None, "ckpt.async_save": True}, "no training states are saved: set --ckpt.state_steps"),
    ({"eval.steps": 3}, "leave --eval.steps out"),
    ({"logger.run_name": "n"}, "set --logger.report_to to one of its names"),
    ({"logger.report_to": "wandb,wndb"}, "of wandb, trackio, mlflow, swanlab and FILE:NAME, with commas between"),
    ({"eval.dataset": "e.jsonl", "eval.n_samples_per_prompt": 4}, "--eval.temperature above 0"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_break_a_rule_are_refused_by_a_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        validate(configured(settings))
    assert message in str(error.value)


OUT_OF_RANGE = {
    "lora.dropout": 1.0,
    "zero_stage": 4,
    "lora.rank": -1,
    "lora.target_modules": ("q_proj", ""),
    "plan_for": (80.0, 2048.0, 0.0),
    "sapo_tau": (1.0, 0.0),
    "vespo_k": (-1.0, 2.0),
    "vespo_lambda": (0.0, 2.0),
    "dro_beta": 0.0,
    "prefix_weight": -1.0,
    "step_weight": -1.0,
    "pass_k": 0,
    "group_length_coef": -0.1,
    "mask_repetition": 0,
    "kl.beta": 1.5,
    "score_centering_top_k": -1,
    "cov_range": (5.0, 1.0),
    "cov_kl_coef": -1.0,
    "positive_nll_coef": -0.1,
    "freezing_steps": -1,
    "critic_lambd": 1.5,
    "correction.low": -1.0,
    "dynamic_filtering_range": (1.0, 0.0),
    "normalize_mean_std": (0.0, 0.0),
    "stop_properly_penalty_coef": 1.5,
    "curriculum_range": (0.9, 0.1),
    "judge_range": (10.0, 1.0),
    "adam.lr": -1e-6,
    "adam.betas": (0.9, 1.0),
    "adam.eps": 0.0,
    "adam.weight_decay": -0.1,
    "muon.lr": -0.1,
    "muon.momentum": 1.0,
    "aux_loss_coef": -0.1,
    "router_z_loss_coef": -0.1,
    "ema_beta": 1.0,
    "lr_warmup_ratio": 1.0,
    "min_lr_ratio": 1.1,
    "lr_decay_ratio": 0.0,
    "max_norm": -1.0,
    "eps_clip": 1.1,
    "eps_clip_low_high": (-0.1, 0.2),
    "dual_clip": 1.0,
    "entropy_coef": -0.1,
    "value_clip": 0.0,
    "gamma": 1.1,
    "lambd": -0.1,
    "init_coef": -0.1,
    "target": 0.0,
    "horizon": 0.0,
    "temperature": -1.0,
    "top_p": 0.0,
    "top_k": -1,
    "stop_strings": ("a", ""),
    "max_failures": -1,
    "max_staleness": -1,
    "seed": -1,
    "timeout": 0.0,
    "clip_range": (1.0, -1.0),
    "steps": 0,
    "output_dir": "",
    "save_steps": 0,
    "state_steps": 0,
    "log_samples": -1,
    "profile_steps": -1,
    "push_to_hub": "name",
    "report_to": ("wndb",),
    "trajectories_max_gib": -1.0,
    "max_len": 1,
    "max_restarts": -1,
}


@pytest.mark.parametrize("key", RANGES)
def test_a_value_out_of_range_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"change --{key}."):
        validate(configured({key: wrong_value(key)}))


def test_a_text_for_a_number_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"train.max_steps is '4', but it must be at least 1: change"):
        validate(configured({"train.max_steps": "4"}))


@pytest.mark.parametrize("key", ["actor.adam.lr", "rollout.temperature", "algo.kl.target"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match="finite"):
        validate(configured({key: value}))


def wrong_value(key: str) -> Any:
    return next((value for name, value in OUT_OF_RANGE.items() if key.endswith(f".{name}")), 0)


def test_all_settings_out_of_range_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as error:
        validate(configured({key: wrong_value(key) for key in RANGES}))
    lines = str(error.value).splitlines()
    assert all(sum(f"change --{key}." in line for line in lines) == 1 for key in RANGES)


def test_broken_rules_of_every_kind_are_told_at_once() -> None:
    broken: dict[str, Any] = {
        "actor.model_name_or_path": "",
        "algo.advantage.estimator": "rlo",
        "actor.eps_clip": 2.0,
        "train.ema_beta": 0.5,
        "data.prompt_probs": (0.5, 0.5),
        "data.input_template": "Q:",
        "reward.function_path": "r.py",
        "eval.steps": 3,
        "ds.zero_stage": 3,
    }
    with pytest.raises(ConfigurationError) as error:
        validate(configured(broken))
    lines = str(error.value).splitlines()
    assert len(lines) == len(set(lines))
    for key in broken:
        assert any(key in line for line in lines), key
    with pytest.raises(ConfigurationError) as error:
        validate_evaluation(configured({"rollout.top_p": 0.0, "data.input_template": "Q:"}))
    assert len(str(error.value).splitlines()) == 4  # the template twice, and nothing to evaluate on


def words_of(name: str, kind: Any) -> list[str]:
    """A flag with a value that is not the default."""
    given = {
        "actor.lora.target_modules": ["q_proj"],
        "ds.zero_stage": ["3"],
        "cluster.max_restarts": ["0"],
        "algo.kl.estimator": ["k2"],
    }
    return [f"--{name}", *given.get(name, [*kind][-1:] if isinstance(kind, type(Enum)) else example(kind))]


@pytest.mark.parametrize("kind", [ActorConfig, ExampleModelConfig])
def test_gradient_checkpointing_may_be_assigned_as_a_switch(kind: Any) -> None:
    actor = kind(gradient_checkpointing=True)
    assert actor.gradient_checkpointing is Checkpointing.FULL
    actor.gradient_checkpointing = False
    assert actor.gradient_checkpointing is Checkpointing.OFF
    assert evolve(actor, gradient_checkpointing=True).gradient_checkpointing is Checkpointing.FULL


def test_every_condition_is_a_sentence_that_says_what_to_set() -> None:
    kinds = flag_kinds(RLConfig)
    conditional = [name for name, _, told in leaves(RLConfig()) if told.only_if]
    conditional += [name for name in kinds if name.startswith(("vllm.", "actor.muon.", "critic.muon."))]
    silent = set()
    for name in conditional:
        _, config, unread = parse_run(TrainArguments, RLConfig, "train rl", words_of(name, kinds[name]))
        assert unread == []
        problems = condition_problems(config)
        assert set(problems) <= {name}
        silent |= {name} - set(problems)
        for problem in problems.values():
            assert re.fullmatch(rf"{name} is .+, but .+: .*--.+, or leave --{name} out\.", problem), problem
            assert "{" not in problem or kinds[name] == FREE  # whose value has braces of its own
    assert len(conditional) > 50
    needs_default = {"data.system_prompt", "data.chat_template", "data.chat_template_kwargs", "data.image_key"}
    # Files of one's own, which are not named by default, take the place of these.
    files = {
        f"{model}.{name}" for model in ("actor", "critic") for name in ("optim", "lr_scheduler", "lr_warmup_ratio")
    }
    # States are saved by default, and what does not go with compiled layers, or with selective checkpointing, is off.
    assert silent == needs_default | files | {"ckpt.async_save", "actor.compile", "actor.gradient_checkpointing"}


def test_a_wrong_number_hides_no_rule_and_breaks_none() -> None:
    """Rules divide by settings, and compare them."""
    for key in RANGES:
        with pytest.raises(ConfigurationError) as error:
            validate(configured({key: wrong_value(key), "eval.n_samples_per_prompt": 4, "eval.dataset": "e.jsonl"}))
        assert "set --eval.temperature above 0" in str(error.value) or key.startswith("eval."), key


def test_a_reward_object_stands_for_the_reward_setting() -> None:
    without = configured({"reward.verifier": None})
    validate(without, has_reward=True)
    validate(configured({}), has_reward=True)
    validate(configured({"data.label_key": None}), has_reward=True)  # which the verifier that it replaces would need


def test_evaluation_needs_no_prompts_to_train_on() -> None:
    config = configured({"data.prompt_dataset": "", "eval.dataset": "e.jsonl"})
    config.algo.advantage.estimator = "rloo"
    validate_evaluation(config)
    with pytest.raises(ConfigurationError, match=r"--eval\.dataset"):
        validate_evaluation(configured({}))
    with pytest.raises(ConfigurationError, match="No reward"):
        validate_evaluation(configured({"eval.dataset": "e.jsonl", "reward.verifier": None}))
    with pytest.raises(ConfigurationError, match="no reward to judge"):
        validate_evaluation(configured({**DISTILL, "eval.dataset": "e.jsonl", "reward.verifier": None}))
    with pytest.raises(ConfigurationError, match=r"--reward\.remote_url"):
        validate_evaluation(configured({"eval.dataset": "e.jsonl", "reward.failure_value": 0.0}))


def test_a_misspelt_setting_of_a_section_is_an_error() -> None:
    config = RLConfig()
    for name in [field.name for field in fields(RLConfig)]:
        with pytest.raises(AttributeError, match="no_such_setting"):
            getattr(config, name).no_such_setting = 1


def test_optimizer_steps_count_partial_batches_and_epochs() -> None:
    config = configured({"rollout.batch_size": 5, "rollout.n_samples_per_prompt": 2, "train.max_epochs": 3})
    assert optimizer_steps_per_rollout(config) == 3
    config.train.batch_size = 4
    assert optimizer_steps_per_rollout(config) == 9


def test_dataset_names_are_trimmed() -> None:
    assert dataset_names(" a.jsonl, b ,") == ("a.jsonl", "b")


@pytest.mark.parametrize("shaping", [{"reward.cosine_length": True}, {"reward.overlong_buffer_len": 20}], ids=str)
def test_environments_take_penalties_of_length_with_a_limit(shaping: dict[str, Any]) -> None:
    settings = {**shaping, "reward.verifier": None}
    with pytest.raises(ConfigurationError, match=r"set --rollout\.max_episode_tokens"):
        validate(configured(settings), has_environment=True)
    validate(configured({**settings, "rollout.max_episode_tokens": 500}), has_environment=True)


@pytest.mark.parametrize(
    ("settings", "plays", "longest"),
    [
        ({}, False, 2048),
        ({"data.max_prompt_tokens": 100, "rollout.max_new_tokens": 28}, False, 128),
        ({"data.max_prompt_tokens": 100, "rollout.max_new_tokens": 28, "eval.max_new_tokens": 50}, False, 150),
        ({"rollout.max_new_tokens": 28}, True, None),
        ({"rollout.max_new_tokens": 28, "rollout.max_episode_tokens": 500}, True, 500),
    ],
)
def test_the_longest_sequence_follows_from_the_limits(
    settings: dict[str, Any], plays: bool, longest: int | None
) -> None:
    assert longest_sequence(configured(settings), plays=plays) == longest


@pytest.mark.parametrize("plays", [{"agent.attempts": 2}, {"train.agent_func_path": "agent.py"}])
def test_an_episode_of_several_turns_is_as_long_as_it_may_be(plays: dict[str, Any]) -> None:
    limits = {**plays, "data.max_prompt_tokens": 100, "rollout.max_new_tokens": 28}
    assert longest_sample(configured(limits)) == 128
    assert longest_sample(configured({**limits, "rollout.max_episode_tokens": 500})) == 500
    assert longest_sample(configured({**limits, "data.max_len": 700})) == 700
