"""Checks of the state that a trained module continues from: of the same weights, of the same optimizer, and whole.

Does not own: how states are made, read or stored (`optimizer`, `stored_state`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rollgrad.adapters.models.torch.optimizers.muon import MOMENTUM, hidden_matrices
from rollgrad.adapters.models.torch.optimizers.trained_module import TrainedModule
from rollgrad.adapters.models.torch.optimizers.untrained_parameters import may_lack_gradient
from rollgrad.domain.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of AdamW's state of a parameter."""


def moment_keys(module: nn.Module, *, muon: bool, own: bool = False) -> dict[str, tuple[str, ...]]:
    """Returns the keys of the optimizer's state of each trainable parameter, by the parameter's name; `muon`: it steps
    hidden matrices by Muon; `own`: it is a user's own, of which no keys are known."""
    if own:
        return {name: () for name, parameter in module.named_parameters() if parameter.requires_grad}
    chosen = set(hidden_matrices(module) if muon else [])
    return {
        name: (MOMENTUM,) if parameter in chosen else MOMENTS
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def check_state(state: Mapping[str, Any], keys: Mapping[str, Sequence[str]], *, averages: bool) -> None:
    """Checks that a `TrainedModule.state_dict` is of the same optimizer, whose `moment_keys` are `keys`, and whole;
    `averages`: a moving average of the weights is kept.

    Raises:
        CheckpointError: it is of another one, or moments are missing.
    """
    lost = [
        name for name, kept in keys.items() if kept and name not in state["moments"] and not may_lack_gradient(name)
    ]
    if lost and state["steps"]:
        raise CheckpointError(
            f"The state to continue from has taken {state['steps']} optimizer steps, but has no moments of {lost[0]} "
            f"({len(lost)} of {len(keys)} parameters): continue from another training state."
        )
    for name, moments in state["moments"].items():
        if not set(keys.get(name, ())) <= set(moments):
            raise CheckpointError(
                f"The state to continue from has {', '.join(sorted(moments))} of {name}, which another optimizer "
                "keeps: set --actor.optim (--critic.optim) to what it was."
            )
        for key in keys.get(name, ()):
            if moments[key].shape != state["masters"][name].shape:
                raise CheckpointError(
                    f"The state to continue from has {key} of {name} in the shape {tuple(moments[key].shape)}, but its "
                    f"weight has {tuple(state['masters'][name].shape)}: continue from another training state."
                )
    if ("averages" in state) != averages:
        raise CheckpointError(
            f"The state to continue from has {'a' if 'averages' in state else 'no'} moving average of the weights: set "
            "--train.enable_ema, --algo.kl.ref_sync_steps, --dpo.ref_sync_steps, or --kto.ref_sync_steps, to what it "
            "was."
        )


def check_same_weights(
    state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], trained: TrainedModule
) -> None:
    """Checks that a state is of a run that trained these parameters.

    Raises:
        CheckpointError: it is of other weights.
    """
    masters = state["masters"]
    if parameters.keys() != masters.keys() or any(
        masters[name].numel() * parameter.element_size() != trained.bytes(parameter)
        for name, parameter in parameters.items()
    ):
        raise CheckpointError(
            "The state to continue from is of a run that trained other weights: set --actor.lora.rank, "
            "--actor.lora.target_modules and --actor.model_name_or_path to what they were."
        )
