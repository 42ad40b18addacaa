"""Rules of a reference that moves toward the policy, in reinforcement learning and in learning from preferences."""

from collections.abc import Iterator
from typing import Any


def moving_problems(run: Any, section: str, steps: int) -> Iterator[str]:
    """Yields the settings that exclude a reference that moves.

    Args:
        run: the settings.
        section: where its `ref_sync_steps` is set.
        steps: optimizer steps after which it moves.
    """
    flag = f"{section}.ref_sync_steps"
    if run.ref.model_name_or_path is not None:
        yield (
            f"{flag} is {steps}, but ref.model_name_or_path is {run.ref.model_name_or_path!r}, and a reference that "
            f"moves begins as the policy: leave --ref.model_name_or_path out, or set --{flag} None."
        )
    if run.train.enable_ema:
        yield (
            f"{flag} is {steps}, but train.enable_ema is on, and one average of the weights is kept: leave "
            f"--train.enable_ema out, or set --{flag} None."
        )
