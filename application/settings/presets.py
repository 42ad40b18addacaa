"""Named recipes: settings that a paper or a reference implementation vetted together, by dotted name.

Several combine (`dapo,tis`); of two that set the same thing the later one counts. Importable without torch.
"""

from collections.abc import Mapping
from typing import Any

from rollgrad.domain.algorithms.catalogue import ESTIMATORS, EstimatorTraits, estimator_traits, plain_name
from rollgrad.domain.errors import ConfigurationError

_GROUP = {"rollout.n_samples_per_prompt": 8}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Schulman et al. 2017, with GAE as OpenRLHF and verl run it.
    "ppo": {"algo.advantage.estimator": "gae"},
    # Yue et al. 2025, table 1: decoupled and length-adaptive GAE, value pre-training, clip-higher, positive NLL.
    "vapo": {
        "algo.advantage.estimator": "gae",
        "algo.advantage.length_adaptive_alpha": 0.05,
        "algo.advantage.critic_lambd": 1.0,
        "actor.eps_clip_low_high": [0.2, 0.28],
        "actor.positive_nll_coef": 0.1,
        "critic.freezing_steps": 50,
        "critic.adam.lr": 2e-6,
        "rollout.n_samples_per_prompt": 16,
    },
    # Hu 2025, with OpenRLHF's KL weight.
    "reinforce_pp": {"algo.advantage.estimator": "reinforce", "algo.kl.init_coef": 0.01},
    "reinforce_pp_baseline": {
        **_GROUP,
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.init_coef": 1e-5,
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k2",
    },
    "rloo": {**_GROUP, "algo.advantage.estimator": "rloo"},
    # Shao et al. 2024, eq. 3: mean over sequences, k3 in the loss; the weight is that of verl's recipes.
    "grpo": {
        **_GROUP,
        "algo.advantage.estimator": "group_norm",
        "actor.loss_aggregation": "sequence_mean",
        "algo.kl.init_coef": 1e-3,
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k3",
    },
    # Liu et al. 2025.
    "dr_grpo": {**_GROUP, "algo.advantage.estimator": "dr_grpo", "actor.loss_aggregation": "constant_length"},
    # Liu et al. 2025, arXiv:2508.08221: PPO's loss over tokens.
    "lite_ppo": {**_GROUP, "algo.advantage.estimator": "lite_ppo", "actor.loss_aggregation": "token_mean"},
    # Li et al. 2026, arXiv:2602.07078: PPO's loss over tokens.
    "otb": {**_GROUP, "algo.advantage.estimator": "optimal_token_baseline", "actor.loss_aggregation": "token_mean"},
    # Yu et al. 2025; the length penalty goes by a run's own limit: --reward.overlong_buffer_len.
    "dapo": {
        "algo.advantage.estimator": "group_norm",
        "actor.eps_clip_low_high": [0.2, 0.28],
        "actor.loss_aggregation": "token_mean",
        "algo.dynamic_filtering_enable": True,
        "rollout.n_samples_per_prompt": 16,
    },
    # Zheng et al. 2025.
    "gspo": {
        **_GROUP,
        "algo.advantage.estimator": "group_norm",
        "actor.policy_loss_type": "gspo",
        "actor.eps_clip_low_high": [3e-4, 4e-4],
    },
    # Liu et al. 2026, arXiv:2602.05261, section 5.1: GSPO whose sequences weigh as much as they have tokens.
    "luspo": {
        **_GROUP,
        "algo.advantage.estimator": "group_norm",
        "actor.policy_loss_type": "gspo",
        "actor.eps_clip_low_high": [2e-3, 2.5e-3],
        "actor.loss_aggregation": "sequence_sum",
    },
    # MiniMax 2025 (no lower bound); the upper bound is ScaleRL's (Khatri et al. 2025) rounded to a ratio of 5.
    "cispo": {
        **_GROUP,
        "algo.advantage.estimator": "group_norm",
        "actor.policy_loss_type": "cispo",
        "actor.eps_clip_low_high": [1.0, 4.0],
    },
    # Shen et al. 2026, arXiv:2602.10693: ratios of sequences against the policy that sampled them.
    "vespo": {
        **_GROUP,
        "algo.advantage.estimator": "group_norm",
        "actor.policy_loss_type": "vespo",
        "algo.old_logprobs": "rollout",
    },
    # Le Roux et al. 2025, arXiv:2503.14286, with the group's mean for the baseline, on samples as they are.
    "topr": {
        **_GROUP,
        "algo.advantage.estimator": "dr_grpo",
        "actor.policy_loss_type": "topr",
        "algo.old_logprobs": "rollout",
    },
    "sapo": {**_GROUP, "algo.advantage.estimator": "group_norm", "actor.policy_loss_type": "sapo"},
    "gmpo": {**_GROUP, "algo.advantage.estimator": "group_norm", "actor.policy_loss_type": "gmpo"},
    "clip_cov": {**_GROUP, "algo.advantage.estimator": "group_norm", "actor.policy_loss_type": "clip_cov"},
    "kl_cov": {**_GROUP, "algo.advantage.estimator": "group_norm", "actor.policy_loss_type": "kl_cov"},
    "dppo": {
        **_GROUP,
        "algo.advantage.estimator": "dr_grpo",
        "actor.policy_loss_type": "dppo_tv",
        "algo.old_logprobs": "rollout",
    },
    # Richemond et al. 2024 with the group's mean for the value, on samples as they are.
    "dro": {
        **_GROUP,
        "algo.advantage.estimator": "dr_grpo",
        "actor.policy_loss_type": "dro",
        "algo.old_logprobs": "rollout",
    },
    "opo": {**_GROUP, "algo.advantage.estimator": "opo", "actor.policy_loss_type": "policy_gradient"},
    "gpg": {**_GROUP, "algo.advantage.estimator": "gpg", "actor.policy_loss_type": "policy_gradient"},
    "maxrl": {**_GROUP, "algo.advantage.estimator": "maxrl"},
    # Chen et al. 2025, arXiv:2508.10751.
    "pass_at_k": {
        "algo.advantage.estimator": "pass_at_k",
        "algo.advantage.pass_k": 4,
        "rollout.n_samples_per_prompt": 16,
    },
    # Feng et al. 2025, arXiv:2505.10978, section 5.1: the settings of the authors' runs.
    "gigpo": {**_GROUP, "algo.advantage.estimator": "gigpo", "algo.advantage.gamma": 0.95},
    "gdpo": {**_GROUP, "algo.advantage.estimator": "gdpo"},
    "remax": {"algo.advantage.estimator": "remax"},
    # Molt 2026: one sample a prompt, one update a rollout, sequences gated by binary KL.
    "flash_reinforce": {
        "algo.advantage.estimator": "flash_reinforce",
        "actor.loss_aggregation": "sequence_mean",
        "algo.correction.level": "sequence",
        "algo.correction.mode": "mask",
        "algo.correction.gate": "binary_kl",
        "algo.correction.threshold": 5e-3,
    },
    "on_policy_distill": {"algo.advantage.estimator": "on_policy_distill", "algo.kl.init_coef": 1.0},
    # Xie et al. 2026, arXiv:2606.22600, with TRL's weight.
    "iw_opd": {"algo.advantage.estimator": "iw_opd", "algo.kl.init_coef": 1.0},
    # Zhao et al. 2026, arXiv:2601.18734, from the sampled tokens: the teacher is the model as it was, told the label.
    "opsd": {
        "algo.advantage.estimator": "on_policy_distill",
        "algo.kl.init_coef": 1.0,
        "algo.kl.teacher_template": "{prompt}\n\nHere is a reference solution:\n{label}\n\nAfter understanding the "
        "reference solution, solve the problem in your own way.",
    },
    # Shenfeld et al. 2026, arXiv:2601.19897, with TRL's column, divergence and teacher, which is the model as it was.
    "sdft": {
        **_GROUP,
        "algo.advantage.estimator": "on_policy_distill",
        "algo.kl.init_coef": 1.0,
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "full",
        "algo.kl.beta": 0.5,
        "algo.kl.teacher_template": "{prompt}\n\n{privileged_context}",
    },
    # Huebotter et al. 2026, arXiv:2601.20802, from the sampled tokens, with the words and the averaged teacher of the
    # authors and TRL.
    "sdpo": {
        **_GROUP,
        "algo.advantage.estimator": "on_policy_distill",
        "algo.kl.init_coef": 1.0,
        "algo.kl.ref_sync_steps": 1,
        "algo.kl.ref_mixup": 0.05,
        "algo.kl.teacher_template": "{prompt}[[\nCorrect solution:\n\n{passed_answer}\n\n]][[\nThe following is "
        "feedback from your unsuccessful earlier attempt:\n\n{reward_feedback}\n\n]]\n\nCorrectly solve the original "
        "question.\n",
    },
    # Off-policy corrections; bounds of Yao et al. 2025, of Ring-1T's IcePop, and of OpenRLHF.
    "tis": {"algo.correction.level": "token", "algo.correction.mode": "truncate", "algo.correction.high": 2.0},
    "icepop": {
        "algo.correction.level": "token",
        "algo.correction.mode": "mask",
        "algo.correction.low": 0.5,
        "algo.correction.high": 5.0,
    },
    "seq_mask_tis": {
        "algo.correction.level": "geometric",
        "algo.correction.mode": "mask",
        "algo.correction.low": 0.5,
        "algo.correction.high": 5.0,
    },
    # Zheng et al. 2025, arXiv:2510.01161, in AReaL's form: PPO's clip stays within the update.
    "m2po": {
        "algo.correction.level": "token",
        "algo.correction.mode": "mask",
        "algo.correction.gate": "second_moment",
        "algo.correction.threshold": 0.04,
    },
    # DeepSeek-V3.2 names no threshold.
    "opsm": {
        "algo.old_logprobs": "rollout",
        "algo.correction.level": "sequence",
        "algo.correction.mode": "mask",
        "algo.correction.gate": "opsm",
        "algo.correction.threshold": 0.1,
    },
}
"""The names that `--algo.preset` takes."""


OTHER_PRESET_NAMES = {
    "drgrpo": "dr_grpo",
    "dr.grpo": "dr_grpo",
    "reinforce++": "reinforce_pp",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce++_baseline": "reinforce_pp_baseline",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
"""Presets by the names of the papers and of verl."""


def preset_name(name: str) -> str | None:
    """The name of a preset in any spelling; None if there is none.

    >>> preset_name("DAPO"), preset_name("reinforce++"), preset_name("a2c")
    ('dapo', 'reinforce_pp', None)
    """
    plain = plain_name(name)
    plain = OTHER_PRESET_NAMES.get(plain, plain)
    return plain if plain in PRESETS else None


def refuse_preset(name: str, setting: str) -> None:
    """Refuses the name of a preset as the value of another setting.

    Raises:
        ConfigurationError: it is one.
    """
    preset = preset_name(name)
    if preset is not None:
        raise ConfigurationError(
            f"{setting} is {name!r}, which is a preset of several settings: set --algo.preset {preset}."
        )


def traits_of(estimator: str) -> EstimatorTraits:
    """Returns the traits of an estimator.

    Raises:
        ConfigurationError: there is none of that name, or it is that of a preset.
    """
    if estimator not in ESTIMATORS:
        refuse_preset(estimator, "algo.advantage.estimator")
    return estimator_traits(estimator)


def preset_settings(names: str) -> dict[str, Any]:
    """The settings of the comma-separated presets `names`, by dotted name.

    Raises:
        ConfigurationError: there is no such preset.
    """
    settings: dict[str, Any] = {}
    for given in (part.strip() for part in names.split(",")):
        name = preset_name(given)
        if name is None:
            raise ConfigurationError(
                f"algo.preset is {names!r}, but {given!r} is none of {', '.join(PRESETS)}: change --algo.preset."
            )
        settings.update(PRESETS[name])
    return settings
