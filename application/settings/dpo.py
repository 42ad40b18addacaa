"""A run that learns from preference pairs: its sections, and the rules across them.

Importable without torch.
"""

from collections.abc import Iterator

from attrs import define

from rollgrad.application.settings.moving_reference import moving_problems
from rollgrad.application.settings.offline import ReferencedRun, reference_problems
from rollgrad.application.settings.rules.examples import example_errors
from rollgrad.application.settings.sections.examples import (
    ExampleAdamConfig,
    ExampleModelConfig,
    ExampleTrainConfig,
    PairDataConfig,
    with_default_lrs,
)
from rollgrad.domain.algorithms.catalogue import IMITATION, PAIR_LOSSES
from rollgrad.domain.algorithms.preference_settings import FDivergence, PreferenceSettings
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import own_first, section


@define(kw_only=True, field_transformer=with_default_lrs)
class PreferenceAdamConfig(ExampleAdamConfig):
    """AdamW on float32 master weights; biases and norm weights are not decayed."""

    default_lrs = (5e-7, 5e-6)


@define(kw_only=True)
class PreferenceModelConfig(ExampleModelConfig):
    """The model that is trained, and its optimizer."""

    adam: PreferenceAdamConfig = section(PreferenceAdamConfig, "AdamW.")


@define(kw_only=True, field_transformer=own_first)
class DPORun(ReferencedRun):
    """A run that learns from preference pairs."""

    actor: PreferenceModelConfig = section(PreferenceModelConfig, "The model that is trained.")
    dpo: PreferenceSettings = section(PreferenceSettings, "The loss of preference pairs.")
    data: PairDataConfig = section(PairDataConfig, "The preference pairs.")
    train: ExampleTrainConfig = section(ExampleTrainConfig, "How pairs become optimizer steps.")

    def evaluated(self) -> tuple[str, ...]:
        """Returns the metrics of `PreferenceObjective`."""
        terms = ("chosen_nll" if name == IMITATION else f"{name}_loss" for name in self.dpo.loss)
        weighed = ("wpo_weight",) if self.dpo.wpo else ()
        return *COMPARED, "chosen_logprob", "rejected_logprob", "chosen_token_accuracy", "entropy", *terms, *weighed


COMPARED = ("loss", "accuracy", "chosen_reward", "rejected_reward", "reward_margin", "chosen_fell_share")
"""Metrics of pairs that compare the policy with its reference, besides the loss of each name."""


def has_reference(dpo: PreferenceSettings) -> bool:
    """Returns whether one of the losses compares with a reference."""
    return any(PAIR_LOSSES[name].reference for name in dpo.loss if name != IMITATION)


def sorts_pairs(dpo: PreferenceSettings) -> bool:
    """Returns whether one of the losses compares a pair with others of its step."""
    return any(PAIR_LOSSES[name].sorts for name in dpo.loss if name != IMITATION)


def dpo_errors(run: DPORun) -> list[ConfigurationError]:
    """Returns every rule that the settings of a run over preference pairs break."""
    return example_errors(run, loss_problems, reference_problems)


def loss_problems(run: DPORun) -> Iterator[str]:
    """Yields what is wrong with the loss and its reference."""
    dpo, default = run.dpo, PreferenceSettings()
    unknown = [name for name in dpo.loss if name not in PAIR_LOSSES and name != IMITATION]
    if unknown:
        yield (
            f"dpo.loss names {', '.join(unknown)}, but the losses are {', '.join(PAIR_LOSSES)} and {IMITATION}: change "
            "--dpo.loss."
        )
        return
    if dpo.loss_weights is not None and len(dpo.loss_weights) != len(dpo.loss):
        yield (
            f"dpo.loss_weights has {len(dpo.loss_weights)} numbers for {len(dpo.loss)} losses: give one for each of "
            "--dpo.loss."
        )
    elif dpo.loss_weights is not None and not any(dpo.loss_weights):
        yield "dpo.loss_weights are all 0, so that nothing is learned: raise one of --dpo.loss_weights."
    yield from _option_problems(dpo, default)
    yield from _weighing_problems(dpo)
    if dpo.loss == (IMITATION,) and (dpo.beta, dpo.ld_alpha) != (default.beta, default.ld_alpha):
        yield f"dpo.beta or dpo.ld_alpha is set, but the loss {IMITATION} compares no replies: leave them out."
    yield from _moving_problems(run)
    if run.ref.model_name_or_path is not None and not has_reference(dpo):
        yield (
            f"ref.model_name_or_path is {run.ref.model_name_or_path!r}, but {', '.join(dpo.loss)} compares with no "
            "reference: leave --ref.model_name_or_path out, or change --dpo.loss."
        )


def _option_problems(dpo: PreferenceSettings, default: PreferenceSettings) -> Iterator[str]:
    """Yields which options of losses no loss reads, and which one lacks."""
    used = {setting for name in dpo.loss if name != IMITATION for setting in PAIR_LOSSES[name].uses}
    for key in ("label_smoothing", "simpo_gamma", "discopop_tau"):
        if getattr(dpo, key) != getattr(default, key) and key not in used:
            readers = ", ".join(name for name, traits in PAIR_LOSSES.items() if key in traits.uses)
            yield (
                f"dpo.{key} is {getattr(dpo, key)}, but none of the losses {', '.join(dpo.loss)} reads it: leave "
                f"--dpo.{key} out, or set --dpo.loss to one of {readers}."
            )
    if dpo.f_divergence is not FDivergence.REVERSE_KL:
        kinds = [name for name, traits in PAIR_LOSSES.items() if "f_divergence" in traits.uses]
        if others := [name for name in dpo.loss if name not in (*kinds, IMITATION)]:
            yield (
                f"dpo.f_divergence is {dpo.f_divergence}, which {', '.join(others)} does not read: leave "
                f"--dpo.f_divergence out, or set --dpo.loss to {', '.join(kinds)} or {IMITATION}."
            )
    if dpo.f_alpha != default.f_alpha and dpo.f_divergence is not FDivergence.ALPHA:
        yield (
            f"dpo.f_alpha is {dpo.f_alpha:g}, but dpo.f_divergence is {dpo.f_divergence}: leave --dpo.f_alpha out, or "
            f"set --dpo.f_divergence {FDivergence.ALPHA}."
        )
    if "exo_pair" in dpo.loss and dpo.label_smoothing == 0:
        yield (
            "dpo.loss has exo_pair, whose divergence is infinite for labels without doubt, but dpo.label_smoothing is "
            "0: set --dpo.label_smoothing, such as 0.001."
        )


def _weighing_problems(dpo: PreferenceSettings) -> Iterator[str]:
    """Yields the losses that pairs cannot be weighted in."""
    if dpo.wpo and dpo.loss == (IMITATION,):
        yield f"dpo.wpo weighs losses of pairs, but dpo.loss is {IMITATION} alone: leave --dpo.wpo out."
    if dpo.wpo and sorts_pairs(dpo):
        yield (
            f"dpo.wpo weighs pairs, but dpo.loss is {' '.join(dpo.loss)}, and aot and aot_unpaired compare replies of "
            "different pairs: leave --dpo.wpo out, or change --dpo.loss."
        )


def _moving_problems(run: DPORun) -> Iterator[str]:
    """Yields the settings that exclude a reference that moves."""
    if run.dpo.ref_sync_steps is None:
        return
    known = f"dpo.ref_sync_steps is {run.dpo.ref_sync_steps}, but "
    if not has_reference(run.dpo):
        yield f"{known}{', '.join(run.dpo.loss)} compares with no reference: leave --dpo.ref_sync_steps out."
    yield from moving_problems(run, "dpo", run.dpo.ref_sync_steps)
    best = run.ckpt.best_metric
    if best is not None and _is_compared(best.rpartition("/")[2]):
        yield (
            f"{known}ckpt.best_metric is {best!r}, which compares with the reference, and that is another one at each "
            "evaluation: set --ckpt.best_metric eval/chosen_token_accuracy, or leave one of the two out."
        )


def _is_compared(metric: str) -> bool:
    """Returns whether a metric of pairs compares with the reference."""
    traits = PAIR_LOSSES.get(metric.removesuffix("_loss"))
    return metric in COMPARED or (metric.endswith("_loss") and traits is not None and traits.reference)
