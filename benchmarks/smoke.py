"""The smallest form of a benchmark, `--smoke`: the same code in seconds, on a random model of two layers.

Its figures mean nothing; that they come out is what `tests/integration/test_benchmarks.py` holds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from rollgrad.application.settings.run import RLConfig

HELP = "smallest work on a tiny random model, to see that the script runs"
REPLY_TOKENS = 10
"""Reply tokens with which the figures in the docs were made; the demo's own replies end by themselves, within 24."""
POSITIONS = 4096
"""Most tokens of the model: its tokenizer makes three times as many of a text as a real one."""


@contextmanager
def smoke_model() -> Iterator[Path]:
    """Makes the model, in a directory that is removed afterwards. Runs draw one chart meanwhile: all of them take as
    long as the run."""
    from rollgrad.adapters.tracking import curves
    from tests.tiny_models import make_tiny_tokenizer, tiny_llama

    with TemporaryDirectory() as directory, mock.patch.object(curves, "PANELS", curves.PANELS[:1]):
        # heads of 32 numbers: the least that vLLM's attention has on a CPU
        yield tiny_llama(make_tiny_tokenizer(), Path(directory) / "model", head_dim=32, positions=POSITIONS)


def shrink(config: RLConfig, model: Path) -> None:
    """Gives a run this model, two prompts of two short samples a step, and a held-out set of two."""
    config.actor.model_name_or_path = str(model)
    config.rollout.batch_size = config.rollout.n_samples_per_prompt = 2
    config.rollout.max_new_tokens = 4
    if config.train.batch_size is not None:
        config.train.batch_size = 2
    if config.rollout.generate_batch_size is not None:
        config.rollout.generate_batch_size = 3
    if config.eval.dataset is not None:
        config.eval.max_samples = 2
