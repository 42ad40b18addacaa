"""Accounts of a finished run: each prompt that it drew was played, dropped or left over."""

from pathlib import Path

from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.application.settings.run import RLConfig


def nothing_is_lost(config: RLConfig) -> None:
    """Prompts submitted = trained + dropped by reason + in flight, after all steps of an asynchronous run."""
    saved = LocalCheckpointStore(Path(config.ckpt.output_dir)).load_training()
    assert saved is not None
    run = saved.state["run"]
    assert run["next_group"] == run["trained"] + sum(run["dropped"].values()) + len(run["pending"])
    assert run["trained"] == config.train.max_steps * config.rollout.batch_size
