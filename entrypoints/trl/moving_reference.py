"""Translates TRL's reference that moves toward the policy, of `trl dpo`, `kto`, `grpo` and `rloo`."""

from rollgrad.entrypoints.translation.draft import Draft

MOVING = ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")
"""TRL's flags of it."""
SYNC_STEPS, MIXUP = 512, 0.6
"""TRL's default numbers of optimizer steps between moves, and the share of the policy in each."""


def follow_policy(draft: Draft, section: str) -> None:
    """Sets how the reference of a `section` of settings moves."""
    if not draft.value("sync_ref_model", False):
        for name in MOVING[1:]:
            draft.lose(name, "the reference never moves without --sync_ref_model, in TRL neither")
        return
    draft.set(f"{section}.ref_sync_steps", draft.value("ref_model_sync_steps", SYNC_STEPS))
    draft.set(f"{section}.ref_mixup", draft.value("ref_model_mixup_alpha", MIXUP))
