from operator import attrgetter
from typing import Any

import pytest

from rollgrad.application.config import (
    Estimator,
    KLEstimator,
    LRScheduler,
    OldLogprobs,
    RLConfig,
    Verifier,
)
from rollgrad.application.ranges import RANGES
from rollgrad.application.validation import (
    dataset_names,
    optimizer_steps_per_rollout,
    validate,
    validate_evaluation,
)
from rollgrad.domain.errors import ConfigurationError

VALID: dict[str, Any] = {
    "actor.model_name_or_path": "model",
    "data.prompt_dataset": "prompts.jsonl",
    "data.label_key": "label",
    "reward.verifier": Verifier.LAST_NUMBER,
}
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
        {"algo.advantage.estimator": Estimator.REINFORCE, "algo.advantage.gamma": 0.9},
        *(
            {"algo.advantage.estimator": estimator, "rollout.n_samples_per_prompt": 2}
            for estimator in (
                Estimator.REINFORCE_BASELINE,
                Estimator.RLOO,
                Estimator.GROUP_NORM,
                Estimator.DR_GRPO,
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
        {"actor.eps_clip_low_high": (0.2, 0.28), "actor.dual_clip": 3.0},
        {"data.prompt_dataset": GYM, "data.size": 50, "reward.verifier": None, "data.label_key": None},
        {"data.prompt_dataset": "a.jsonl,b.jsonl", "data.prompt_probs": (0.3, 0.7)},
        {"reward.verifier": Verifier.FORMAT, "reward.format_pattern": "<a>.*</a>", "data.label_key": None},
        {"reward.verifier": None, "reward.function_path": "reward.py", "data.label_key": None},
        {"data.apply_chat_template": False, "data.input_template": "Q: {}\nA:"},
        {"data.system_prompt": "Be brief."},
        {"eval.dataset": "e.jsonl", "eval.n_samples_per_prompt": 4, "eval.temperature": 0.7, "eval.steps": 5},
    ],
)
def test_allows(settings: dict[str, Any]) -> None:
    validate(configured(settings))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"actor.model_name_or_path": ""}, "--actor.model_name_or_path"),
    ({"data.prompt_dataset": ""}, "--data.prompt_dataset"),
    *(
        ({"algo.advantage.estimator": estimator}, "is 1: set --rollout.n_samples_per_prompt")
        for estimator in (Estimator.REINFORCE_BASELINE, Estimator.RLOO, Estimator.GROUP_NORM, Estimator.DR_GRPO)
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
            (Estimator.REINFORCE_BASELINE, "gamma", 0.9),
            (Estimator.RLOO, "gamma", 0.9),
            (Estimator.GROUP_NORM, "gamma", 0.9),
            (Estimator.DR_GRPO, "gamma", 0.9),
            (Estimator.REINFORCE, "lambd", 0.9),
            (Estimator.RLOO, "no_std_norm", True),
            (Estimator.GROUP_NORM, "no_std_norm", True),
            (Estimator.DR_GRPO, "no_std_norm", True),
        )
    ),
    ({"algo.advantage.estimator": Estimator.REINFORCE, "critic.value_clip": 0.2}, "leave --critic.value_clip out"),
    ({"algo.advantage.estimator": Estimator.REINFORCE, "critic.adam.lr": 1e-3}, "leave --critic.adam.lr out"),
    ({"ref.model_name_or_path": "r"}, "--ref.model_name_or_path out"),
    ({"algo.kl.target": 0.1}, "--algo.kl.target out"),
    ({"algo.kl.use_loss": True}, "--algo.kl.use_loss out"),
    ({"algo.kl.estimator": KLEstimator.K2}, "--algo.kl.estimator out"),
    ({"algo.kl.init_coef": 0.1, "algo.kl.horizon": 5.0}, "set --algo.kl.target"),
    ({"algo.kl.init_coef": 0.1, "algo.kl.use_loss": True}, "--algo.kl.estimator to k2 or k3"),
    ({"actor.min_lr_ratio": 0.2}, "--actor.lr_scheduler"),
    ({"critic.min_lr_ratio": 0.2}, "--critic.lr_scheduler"),
    ({"actor.eps_clip": 0.1, "actor.eps_clip_low_high": (0.2, 0.28)}, "leave --actor.eps_clip out"),
    ({"train.max_steps": 3, "train.num_episodes": 2}, "--train.num_episodes"),
    ({"train.batch_size": 129}, "128 prompts x 1 samples = 128"),
    ({"algo.old_logprobs": OldLogprobs.ROLLOUT}, "single optimizer step"),
    ({"algo.old_logprobs": OldLogprobs.ROLLOUT, "train.batch_size": 64, "rollout.top_p": 0.9}, "truncated"),
    ({"algo.old_logprobs": OldLogprobs.ROLLOUT, "train.max_epochs": 2, "rollout.top_k": 5}, "truncated"),
    ({"rollout.temperature": 0.0}, "greedy"),
    ({"data.prompt_probs": (0.5, 0.5)}, "2 numbers for 1 datasets"),
    ({"data.prompt_dataset": "a,b", "data.prompt_probs": (0.5, 0.6)}, "sum 1.1"),
    ({"data.prompt_dataset": "a,b", "data.prompt_probs": (-0.5, 1.5)}, "at least 0"),
    ({"data.size": 5}, "--data.size"),
    ({"data.apply_chat_template": False, "data.system_prompt": "Be brief."}, "--data.apply_chat_template"),
    ({"data.input_template": "Q: {}"}, "--data.no_apply_chat_template"),
    ({"data.apply_chat_template": False, "data.input_template": "Q:"}, "no {}"),
    ({"reward.verifier": None}, "--reward.function_path or --reward.verifier"),
    ({"data.prompt_dataset": f"{GYM},a.jsonl", "reward.verifier": None}, "No reward"),
    ({"reward.function_path": "r.py"}, "both set"),
    ({"reward.verifier": Verifier.FORMAT}, "--reward.format_pattern"),
    ({"reward.format_pattern": "a"}, "set --reward.verifier to format"),
    ({"reward.verifier": Verifier.FORMAT, "reward.format_pattern": "("}, "no regular expression"),
    ({"data.label_key": None}, "--data.label_key"),
    ({"data.label_key": None, "reward.verifier": Verifier.MATH}, "--data.label_key"),
    ({"data.label_key": None, "reward.verifier": Verifier.EXACT_MATCH}, "--data.label_key"),
    ({"eval.steps": 3}, "leave --eval.steps out"),
    ({"eval.dataset": "e.jsonl", "eval.n_samples_per_prompt": 4}, "--eval.temperature above 0"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        validate(configured(settings))
    assert message in str(error.value)


OUT_OF_RANGE = {
    "adam.lr": -1e-6,
    "adam.betas": (0.9, 1.0),
    "adam.eps": 0.0,
    "adam.weight_decay": -0.1,
    "lr_warmup_ratio": 1.0,
    "min_lr_ratio": 1.1,
    "max_norm": -1.0,
    "eps_clip": 1.0,
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
    "seed": -1,
    "timeout": 0.0,
    "clip_range": (1.0, -1.0),
    "steps": 0,
    "output_dir": "",
    "save_steps": 0,
    "log_samples": -1,
}


@pytest.mark.parametrize("key", RANGES)
def test_refuses_a_value_out_of_range(key: str) -> None:
    bad = next((value for name, value in OUT_OF_RANGE.items() if key.endswith(f".{name}")), 0)
    with pytest.raises(ConfigurationError, match=f"change --{key}."):
        validate(configured({key: bad}))


@pytest.mark.parametrize("key", ["actor.adam.lr", "rollout.temperature", "algo.kl.target"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_a_number_that_is_not_finite(key: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match="finite"):
        validate(configured({key: value}))


def test_a_reward_object_stands_for_the_reward_setting() -> None:
    without = configured({"reward.verifier": None})
    validate(without, has_reward=True)
    validate(configured({}), has_reward=True)


def test_evaluation_needs_no_prompts_to_train_on() -> None:
    config = configured({"data.prompt_dataset": "", "eval.dataset": "e.jsonl"})
    config.algo.advantage.estimator = Estimator.RLOO
    validate_evaluation(config)
    with pytest.raises(ConfigurationError, match=r"--eval\.dataset"):
        validate_evaluation(configured({}))
    with pytest.raises(ConfigurationError, match="No reward"):
        validate_evaluation(configured({"eval.dataset": "e.jsonl", "reward.verifier": None}))


def test_optimizer_steps_count_partial_batches_and_epochs() -> None:
    config = configured({"rollout.batch_size": 5, "rollout.n_samples_per_prompt": 2, "train.max_epochs": 3})
    assert optimizer_steps_per_rollout(config) == 3
    config.train.batch_size = 4
    assert optimizer_steps_per_rollout(config) == 9


def test_dataset_names_are_trimmed() -> None:
    assert dataset_names(" a.jsonl, b ,") == ("a.jsonl", "b")
