"""Columns that an estimator or a loss returns: one value for each token."""

from torch import Tensor

from rollgrad.domain.errors import ConfigurationError


def check_tokens(who: str, column: str, values_N: Tensor, action_mask_N: Tensor) -> None:
    """Checks that `values_N`, which `who` returned as `column`, has a value for each token: a mean over them would
    otherwise count at each of them, and the gradient depend on how a batch is divided.

    Raises:
        ConfigurationError: it has not.
    """
    if not isinstance(values_N, Tensor) or values_N.shape != action_mask_N.shape:
        shape = tuple(values_N.shape) if isinstance(values_N, Tensor) else type(values_N).__name__
        raise ConfigurationError(
            f"{who} returned {column} of shape {shape} for {len(action_mask_N)} tokens: return one value for each "
            "token, and leave means over tokens to --actor.loss_aggregation."
        )
