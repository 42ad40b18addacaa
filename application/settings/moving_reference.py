"""Rules of a reference that moves toward the policy, in reinforcement learning and in learning from preferences."""

from collections.abc import Iterator
from typing import Any


def moving_problems(run: Any, section: str, steps: int) -> Iterator[str]:
    """Yields what a reference does not go with that moves after so many optimizer steps, as `section` of the settings
    says, whatever it is compared by."""
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
