"""Cost of saving a training state: the seconds in which a run does nothing else, as a share of the time between two
states (the default of `ckpt.state_minutes`). With `ckpt.async_save` a run copies the state and goes on while the copy
is written; the seconds that this leaves are measured, too.

A Llama with random weights after an optimizer step, by default of SmolLM2-135M's sizes, whose state has 12 bytes a
parameter; with hashes, and waiting until it is on the disk, as in a run.

    python benchmarks/state_save.py [--directory DIR]
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import tyro
from attrs import define, evolve
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.results import keep
from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.application.pipelines.state_writing import StateWriter
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.ports.checkpoint_store import TrainingState
from rollgrad.domain.ports.models import LossOutput, TokenScores
from rollgrad.testing.agent_executor import make_trajectory

REPEATS = 3


@define(kw_only=True)
class Work:
    """Settings of the measurement."""

    hidden: int = 576
    """Numbers of a hidden state."""
    layers: int = 30
    """Layers."""
    vocabulary: int = 49152
    """Tokens."""
    directory: str | None = None
    """Place of the state; by default that of temporary files."""
    smoke: bool = False
    """Smallest work, to see that the script runs; its figures mean nothing."""


def main(work: Work) -> None:
    """Trains a step, and saves the state."""
    if work.smoke:
        work = evolve(work, hidden=64, layers=2, vocabulary=512)
    minutes = CheckpointConfig().state_minutes
    assert minutes is not None
    with tempfile.TemporaryDirectory(dir=work.directory) as directory:
        policy = trained(work, Path(directory))
        size = sum(tensor.nbytes for tensor in tensors_of(policy.state_dict()))
        writer = StateWriter(LocalCheckpointStore(Path(directory)), required=True)
        saves, begins = list[float](), list[float]()
        for step in range(REPEATS):
            for write, seconds in ((writer.save, saves), (writer.begin, begins)):
                begun = time.perf_counter()
                state = {"run": {}, "update": {"policy": policy.state_dict()}, "before": {}}
                write(TrainingState(step=step, state=state, description={}))
                seconds.append(time.perf_counter() - begun)
                del state
                writer.finish()
    save, begin = sorted(saves)[REPEATS // 2], sorted(begins)[REPEATS // 2]
    share = save / (60 * minutes)
    table = Table("state", "saved in", "rate", f"share of {minutes:g} minutes", "with ckpt.async_save")
    table.add_row(
        f"{size / 1e9:.2f} GB", f"{save:.2f} s", f"{size / save / 1e9:.2f} GB/s", f"{share:.2%}", f"{begin:.2f} s"
    )
    Console(width=110).print(table)
    if not work.smoke:
        found = {"bytes": size, "seconds": saves, "with_async_save": begins, "share": share}
        print(f"kept in {keep('state_save', found)}")


def trained(work: Work, directory: Path) -> TorchPolicy:
    """Returns a policy that has made an optimizer step, whose moments are therefore there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=work.hidden,
        intermediate_size=8 * work.hidden // 3,
        num_attention_heads=9 if work.hidden % 9 == 0 else 4,
        num_key_value_heads=3 if work.hidden % 9 == 0 else 2,
        num_hidden_layers=work.layers,
        vocab_size=work.vocabulary,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "begun")
    model = load_causal_lm(
        str(directory / "begun"), dtype=torch.float32, device=torch.device("cpu"), flag="--actor.model_name_or_path"
    )
    policy = TorchPolicy(model, None, OptimizerSettings(lr=1e-4))
    policy.update([pack([make_trajectory([1, 2, 3], [4, 5, 6])])], likelihood)
    return policy


def likelihood(scores: TokenScores, batch: PackedBatch) -> LossOutput:
    """Returns the mean negative log-likelihood of the actions."""
    return LossOutput(loss=-scores.logprobs_N.mean())


def tensors_of(value: Any) -> Any:
    """Yields all tensors of nested mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)


if __name__ == "__main__":
    main(tyro.cli(Work, description=__doc__))
