"""Catalogue of the algorithms and of what each needs from a run. It imports no torch, so that a bad command is
refused at once.

The functions are in `domain.algorithms.estimators` and `domain.algorithms.losses`; a user's own file adds to them with
`@estimator`, `@policy_loss` and `@kl_estimator`.
"""

import difflib
from collections.abc import Collection, Container, Mapping
from typing import Any, TypeVar

import attrs
from attrs import evolve, frozen

from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import SettingMetadata

Traits = TypeVar("Traits", bound="_AlgorithmTraits")

NEEDS = ("group", "critic", "greedy_baseline", "teacher", "reward_parts", "rewards_from_0", "states", "collisions")
"""Needs that an estimator may have: several samples of a prompt, values, a greedy rollout of each prompt, a teacher's
log-probs, rewards that come in named parts, rewards of at least 0, the states in which turns were played, and the
policy's collision entropies."""

WHITENINGS = ("none", "batch", "group")
"""Tokens over which advantages are centred and scaled after the estimator: none, all action tokens, or a group's."""


@frozen(kw_only=True)
class _AlgorithmTraits:
    """`settings`: class of the settings that the function brings and takes third, whose fields are made by `setting`;
    they are a section of `algo.estimators` or `algo.losses`."""

    settings: type[Any] | None = None

    def own(self, settings: Any = None) -> tuple[Any, ...]:
        """Returns what the function takes besides inputs and parameters: settings of its own, if it has any."""
        return () if self.settings is None else (settings or self.settings(),)


@frozen(kw_only=True)
class EstimatorTraits(_AlgorithmTraits):
    """Traits of an estimator: its `needs`, from `NEEDS`; the settings of `algo.advantage` that it `uses`; and the
    whitening that it takes by default, from `WHITENINGS`."""

    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    whiten: str = "none"


@frozen(kw_only=True)
class PolicyLossTraits(_AlgorithmTraits):
    """Traits of a policy loss."""

    clip: tuple[float, float] | None = (0.2, 0.2)
    """Default (lower, upper) clip range; None if it clips nothing."""
    aggregation: str = "token_mean"
    """Default way from token losses to one number."""
    uses: tuple[str, ...] = ()
    """Settings of `actor` that it reads besides the clip range."""
    proportional: bool = False
    """Whether a token with advantage 0 has no gradient, so that samples without advantages may be left out."""
    on_policy: bool = False
    """Whether it takes every sample for one of the current policy: it has no ratio, so that only a correction accounts
    for others."""
    by_token: bool = False
    """Whether its gradient at each token, where the ratio is 1, is minus the advantage times the gradient of the
    token's own log-prob, so that score centering can take the mean out."""


@frozen(kw_only=True)
class PairLossTraits:
    """Traits of a loss of pairs."""

    reference: bool = True
    """Whether it compares with a reference."""
    sums: bool = False
    """Whether a loss without a reference is of sums over tokens, rather than of means."""
    beta: float = 0.1
    """Beta where none is set."""
    sorts: bool = False
    """Whether it compares a pair with others of its optimizer step, by their rank."""
    uses: tuple[str, ...] = ()
    """Other settings that change it."""


ESTIMATORS: dict[str, EstimatorTraits] = {
    "gae": EstimatorTraits(
        needs=("critic",), uses=("gamma", "lambd", "critic_lambd", "length_adaptive_alpha"), whiten="batch"
    ),
    "turn_gae": EstimatorTraits(needs=("critic",), uses=("gamma", "lambd", "critic_lambd"), whiten="batch"),
    "reinforce": EstimatorTraits(uses=("gamma",), whiten="batch"),
    "reinforce_baseline": EstimatorTraits(needs=("group",), whiten="batch"),
    "rloo": EstimatorTraits(needs=("group",)),
    "rloo_sequence": EstimatorTraits(needs=("group",)),
    "group_norm": EstimatorTraits(needs=("group",)),
    "dr_grpo": EstimatorTraits(needs=("group",)),
    "lite_ppo": EstimatorTraits(needs=("group",)),
    "opo": EstimatorTraits(needs=("group",)),
    "optimal_token_baseline": EstimatorTraits(needs=("group", "collisions")),
    "gpg": EstimatorTraits(needs=("group",)),
    "maxrl": EstimatorTraits(needs=("group", "rewards_from_0")),
    "pass_at_k": EstimatorTraits(needs=("group",), uses=("pass_k",)),
    "gdpo": EstimatorTraits(needs=("group", "reward_parts")),
    "turn_group_norm": EstimatorTraits(needs=("group",), uses=("gamma",)),
    "process_group_norm": EstimatorTraits(needs=("group",)),
    "gigpo": EstimatorTraits(needs=("group", "states"), uses=("gamma", "step_weight", "no_std_norm")),
    "remax": EstimatorTraits(needs=("greedy_baseline",)),
    "flash_reinforce": EstimatorTraits(),
    "on_policy_distill": EstimatorTraits(needs=("teacher",)),
    "iw_opd": EstimatorTraits(needs=("teacher",), uses=("prefix_weight",)),
}
"""The names that `--algo.advantage.estimator` takes."""

POLICY_LOSSES: dict[str, PolicyLossTraits] = {
    "ppo": PolicyLossTraits(proportional=True, by_token=True, uses=("dual_clip",)),
    "sequence_ppo": PolicyLossTraits(proportional=True, aggregation="sequence_mean"),
    "gspo": PolicyLossTraits(proportional=True, clip=(3e-4, 4e-4), aggregation="sequence_mean"),
    "gspo_token": PolicyLossTraits(proportional=True, clip=(3e-4, 4e-4), aggregation="sequence_mean"),
    "gmpo": PolicyLossTraits(proportional=True, clip=(0.4, 0.4), aggregation="sequence_mean"),
    "cispo": PolicyLossTraits(proportional=True, by_token=True, clip=(1.0, 4.0)),
    "sapo": PolicyLossTraits(
        proportional=True, by_token=True, clip=None, aggregation="sequence_mean", uses=("sapo_tau",)
    ),
    "vespo": PolicyLossTraits(proportional=True, clip=None, uses=("vespo_k", "vespo_lambda")),
    "topr": PolicyLossTraits(proportional=True, clip=None, aggregation="sequence_sum"),
    "clip_cov": PolicyLossTraits(proportional=True, uses=("cov_share", "cov_range")),
    "kl_cov": PolicyLossTraits(clip=None, uses=("cov_share", "cov_kl_coef")),
    "dppo_tv": PolicyLossTraits(proportional=True, by_token=True, clip=(0.15, 0.15)),
    "dppo_kl": PolicyLossTraits(proportional=True, by_token=True, clip=(0.05, 0.05)),
    "policy_gradient": PolicyLossTraits(proportional=True, by_token=True, clip=None, on_policy=True),
    "dro": PolicyLossTraits(clip=None, by_token=True, uses=("dro_beta",)),
}
"""The names that `--actor.policy_loss_type` takes."""

KL_ESTIMATORS = ["k1", "k2", "k3", "k3_unbiased", "abs", "full"]
"""The names that `--algo.kl.estimator` takes; those after `full` are a user's own."""

PAIR_LOSSES: dict[str, PairLossTraits] = {
    "sigmoid": PairLossTraits(uses=("label_smoothing", "f_divergence")),
    "robust": PairLossTraits(uses=("label_smoothing", "f_divergence")),
    "ipo": PairLossTraits(),
    "ipo_sum": PairLossTraits(uses=("f_divergence",)),
    "hinge": PairLossTraits(uses=("f_divergence",)),
    "sigmoid_norm": PairLossTraits(beta=5.0, uses=("label_smoothing",)),
    "simpo": PairLossTraits(reference=False, beta=2.0, uses=("simpo_gamma", "label_smoothing")),
    "cpo": PairLossTraits(reference=False, sums=True, uses=("label_smoothing",)),
    "orpo": PairLossTraits(reference=False),
    "apo_zero": PairLossTraits(),
    "apo_down": PairLossTraits(),
    "nca_pair": PairLossTraits(),
    "bco_pair": PairLossTraits(),
    "exo_pair": PairLossTraits(uses=("label_smoothing", "f_divergence")),
    "sppo_hard": PairLossTraits(),
    "discopop": PairLossTraits(uses=("discopop_tau", "f_divergence")),
    "aot": PairLossTraits(sorts=True, uses=("label_smoothing",)),
    "aot_unpaired": PairLossTraits(sorts=True, uses=("label_smoothing",)),
}
"""The losses of preference pairs that `--dpo.loss` takes."""

IMITATION = "sft"
"""Name in a mixture of losses that stands for the negative log-likelihood of the chosen replies, which is no loss of
pairs: it is a mean over the tokens of all chosen replies of the optimizer step."""


OTHER_ESTIMATOR_NAMES = {
    "ppo": "gae",
    "grpo": "group_norm",
    "grpo_vectorized": "group_norm",
    "drgrpo": "dr_grpo",
    "dr.grpo": "dr_grpo",
    "rloo_vectorized": "rloo",
    "reinforce++": "reinforce",
    "reinforce_pp": "reinforce",
    "reinforce_plus_plus": "reinforce",
    "reinforce++_baseline": "reinforce_baseline",
    "reinforce_pp_baseline": "reinforce_baseline",
    "reinforce_plus_plus_baseline": "reinforce_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
"""Names of estimators in papers and in verl, and their names here."""

OTHER_KL_ESTIMATOR_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""Names of KL estimators in verl, and their names here."""

OTHER_POLICY_LOSS_NAMES = {"vanilla": "ppo", "clip": "ppo", "geo_mean": "gmpo", "reinforce": "policy_gradient"}
"""Names of policy losses in papers and in verl, and their names here."""


def estimator_settings() -> dict[str, type[Any]]:
    """Returns the classes of settings that estimators bring, by the estimator's name."""
    return {name: traits.settings for name, traits in ESTIMATORS.items() if traits.settings is not None}


def policy_loss_settings() -> dict[str, type[Any]]:
    """Returns the classes of settings that policy losses bring, by the loss's name."""
    return {name: traits.settings for name, traits in POLICY_LOSSES.items() if traits.settings is not None}


def with_settings(traits: Traits, name: str, settings: type[Any] | None) -> Traits:
    """Returns the traits of an algorithm that brings `settings`; None leaves them as they are.

    Raises:
        ConfigurationError: the settings cannot be a section of that name.
    """
    if settings is None:
        return traits
    if not name.isidentifier():
        raise ConfigurationError(
            f"{name!r} brings settings, which have the name before them ({name}.SETTING): use letters, digits and _."
        )
    for field in attrs.fields(settings):
        SettingMetadata.of(field)
    return evolve(traits, settings=settings)


def plain_name(name: str) -> str:
    """Returns a name in small letters, with underscores for hyphens and spaces.

    >>> plain_name("Clip-Cov")
    'clip_cov'
    """
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def canonical_estimator(name: str) -> str:
    """Returns the catalogue's name of an estimator in any spelling; a name that is not known stays as it is.

    >>> canonical_estimator("GRPO"), canonical_estimator("reinforce++"), canonical_estimator("my_own")
    ('group_norm', 'reinforce', 'my_own')
    """
    return _canonical(name, ESTIMATORS, OTHER_ESTIMATOR_NAMES)


def canonical_policy_loss(name: str) -> str:
    """Returns the catalogue's name of a policy loss in any spelling; a name that is not known stays as it is.

    >>> canonical_policy_loss("vanilla"), canonical_policy_loss("GSPO-token")
    ('ppo', 'gspo_token')
    """
    return _canonical(name, POLICY_LOSSES, OTHER_POLICY_LOSS_NAMES)


def canonical_kl_estimator(name: str) -> str:
    """Returns the catalogue's name of a KL estimator in any spelling; a name that is not known stays as it is.

    >>> canonical_kl_estimator("low_var_kl"), canonical_kl_estimator("K3")
    ('k3', 'k3')
    """
    return _canonical(str(name), KL_ESTIMATORS, OTHER_KL_ESTIMATOR_NAMES)  # of a member of `KLEstimator`, too


def _canonical(name: str, known: Container[str], others: Mapping[str, str]) -> str:
    if name in known:  # also the name of a user's own
        return name
    plain = plain_name(name)
    plain = others.get(plain, plain)
    return plain if plain in known else name


def estimator_traits(name: str) -> EstimatorTraits:
    """Returns the traits of estimator `name`.

    Raises:
        ConfigurationError: there is none of that name; the sentence lists the known ones.
    """
    return _find(name, ESTIMATORS, "algo.advantage.estimator")


def policy_loss_traits(name: str) -> PolicyLossTraits:
    """Returns the traits of policy loss `name`.

    Raises:
        ConfigurationError: there is none of that name; the sentence lists the known ones.
    """
    return _find(name, POLICY_LOSSES, "actor.policy_loss_type")


def check_kl_estimator(name: str) -> None:
    """Checks that there is a KL estimator of this name.

    Raises:
        ConfigurationError: there is none; the sentence lists the known ones.
    """
    _check(name, KL_ESTIMATORS, "algo.kl.estimator")


def _find(name: str, known: dict[str, Traits], key: str) -> Traits:
    _check(name, known, key)
    return known[name]


def _check(name: str, known: Collection[str], key: str) -> None:
    if name in known:
        return
    similar = difflib.get_close_matches(plain_name(name), known, n=1, cutoff=0.8)
    hint = f" (did you mean {similar[0]}?)" if similar else ""
    raise ConfigurationError(
        f"{key} is {name!r}, which is none of {', '.join(known)}{hint}: change --{key}, or define it "
        "in the file of --algo.extension_path."
    )
