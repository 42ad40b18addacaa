"""The memory of passes that is counted without weights is that of real ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.models.torch.adapter_dropout import AdapterDropout
from rollgrad.adapters.models.torch.forward import PackedValue
from rollgrad.adapters.models.torch.layers.padded import use_exact_attention
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.planning import pass_memory, uncomputed
from rollgrad.adapters.models.torch.planning.pass_memory import ROUNDING, measured_passes
from rollgrad.adapters.models.torch.recomputation import Recomputation
from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.adapters.models.torch.rewards.reward_text import EncodedText
from rollgrad.application.settings.model_shape import PassMemory, bytes_of_pass
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.testing.agent_executor import make_trajectory
from tests.tiny_architectures import tiny_model

CPU = torch.device("cpu")
LENGTH, ROWS = 64, 16
TOLERANCE = 0.05
"""Share that a pass of a tiny model holds besides, of its positions and of the states that its head reads."""


@pytest.fixture
def path(architecture: str, tmp_path: Path) -> str:
    tiny_model(architecture).save_pretrained(tmp_path)
    return str(tmp_path)


FOUND: dict[Any, PassMemory] = {}
"""The memory of passes on a CPU, by the settings of the model and those of the passes: several tests ask for the
same."""


def measured(path: str, device: torch.device = CPU, **settings: Any) -> PassMemory:
    key = Path(path, "config.json").read_bytes(), *sorted(settings.items())
    if device == CPU and key in FOUND:
        return FOUND[key]
    found = measured_passes(path, dtype=torch.float32, device=device, longest=LENGTH, **settings)
    assert found is not None
    if device == CPU:
        FOUND[key] = found
    return found


def batch() -> PackedBatch:
    """Each sequence has a prompt of its own."""
    replies = [[3 + (7 * row + token) % 80 for token in range(LENGTH - 1)] for row in range(ROWS)]
    return pack([make_trajectory([3 + row], reply, group_id=row, sample_id=row) for row, reply in enumerate(replies)])


@contextmanager
def gradients_dropped(module: torch.nn.Module) -> Iterator[None]:
    handles = [p.register_post_accumulate_grad_hook(pass_memory._drop) for p in module.parameters() if p.requires_grad]
    yield
    for handle in handles:
        handle.remove()


# With experts; with sinks; with capped scores; with layers that look back a little alone, and all; with queries, keys
# and values from one product, in whose memory they lie; with biases and learned positions.
@pytest.mark.parametrize(
    "architecture",
    [
        *("llama", "qwen3_moe", "granite_swa", "gemma2", "phi3", "gpt2"),
        pytest.param("gemma3_text", marks=pytest.mark.wide),
    ],
)
def test_passes_hold_what_is_measured_without_weights(path: str) -> None:
    without, model = measured(path), load_causal_lm(path, dtype=torch.float32, device=CPU, flag="--model")
    value = PackedValue(model, {})
    held: dict[str, int] = {}
    with torch.no_grad(), pass_memory._Alive(value) as alive:
        value(batch())
    held["scored"] = alive.peak
    with gradients_dropped(value), pass_memory._Alive(value) as alive:
        values_A = value(batch())
        held["saved"] = alive.now
        values_A.sum().backward()
    held["trained"] = alive.peak
    for name, found in held.items():
        planned = bytes_of_pass(getattr(without, name), ROWS * LENGTH) / ROUNDING
        assert planned == pytest.approx(found, rel=TOLERANCE), name


@pytest.mark.parametrize("offloads", [pytest.param(False, marks=pytest.mark.wide), True])
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        *(("llama", kind) for kind in (Checkpointing.FULL, Checkpointing.SELECTIVE)),
        ("qwen3_moe", Checkpointing.FULL),
        pytest.param("qwen3_moe", Checkpointing.SELECTIVE, marks=pytest.mark.wide),
    ],
)
def test_passes_that_are_computed_again_hold_what_is_measured(path: str, kind: Checkpointing, offloads: bool) -> None:
    without = measured(path, checkpointing=kind, offloads=offloads)
    model = load_causal_lm(path, dtype=torch.float32, device=CPU, flag="--model")
    recomputation = Recomputation(model, AdapterDropout(model), kind, offloads=offloads)
    value = PackedValue(model, {})
    with recomputation.during(value), gradients_dropped(value), pass_memory._Alive(value) as alive:
        values_A = value(batch())
        saved = alive.now
        values_A.sum().backward()
    for points, found in ((without.saved, saved), (without.trained, alive.peak)):
        assert bytes_of_pass(points, ROWS * LENGTH) / ROUNDING == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.parametrize("architecture", ["llama"])
def test_inputs_in_the_machines_memory_are_not_on_a_gpu(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncomputed, "has_varlen", lambda *_: True)
    stay, moved = (
        bytes_of_pass(
            measured(path, torch.device("cuda"), checkpointing=Checkpointing.FULL, offloads=offloads).saved, 1024
        )
        for offloads in (False, True)
    )
    layers, hidden = 2, 32
    assert (stay - moved) / ROUNDING == pytest.approx((layers - 1) * 1024 * hidden * 4, rel=0.01), (
        "but that of the last"
    )


@pytest.mark.parametrize("architecture", ["llama"])
def test_products_that_are_made_again_are_counted(path: str) -> None:
    found = {kind: measured(path, checkpointing=kind) for kind in Checkpointing}
    last = 2 * 32 * 32 * 2  # of each layer, on whose result no gradient depends
    assert found[Checkpointing.FULL].recomputed == pytest.approx(found[Checkpointing.OFF].flops - last, rel=1e-3)
    assert found[Checkpointing.SELECTIVE].recomputed == found[Checkpointing.OFF].recomputed == 0


@pytest.mark.parametrize(("architecture", "tolerance"), [("llama", 0.1), ("gemma2", 0.25)])
def test_short_prompts_have_few_scores(path: str, tolerance: float) -> None:
    whole = measured(path, prompt=16)
    model = PackedValue(load_causal_lm(path, dtype=torch.float32, device=CPU, flag="--model"), {})
    prompts = pack([make_trajectory([3 + row], [5] * 15, group_id=row, sample_id=row) for row in range(64)])
    with torch.no_grad(), pass_memory._Alive(model) as alive:
        model(prompts)
    assert bytes_of_pass(whole.prompted, 1024) / ROUNDING == pytest.approx(alive.peak, rel=tolerance)


@pytest.mark.parametrize("architecture", ["llama", pytest.param("phi3", marks=pytest.mark.wide), "gemma2"])
def test_texts_hold_what_is_measured_without_weights(path: str) -> None:
    without = measured_passes(path, dtype=torch.float32, device=CPU, longest=LENGTH, judges=True)
    assert without is not None
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    use_exact_attention(model.eval())
    texts = [tuple(range(3, 3 + LENGTH - (row == 1))) for row in range(ROWS)]  # one of them is filled up
    with torch.no_grad(), pass_memory._Alive(model) as alive:
        RewardModel(model, None).score_encoded([EncodedText(text, truncated=False) for text in texts])
    assert bytes_of_pass(without.scored, ROWS * LENGTH) / ROUNDING == pytest.approx(alive.peak, rel=TOLERANCE)


@pytest.mark.parametrize(("architecture", "experts"), [("llama", 1), ("qwen3_moe", 2 / 4)])
def test_a_token_is_multiplied_with_the_matrices_of_the_experts_that_it_chooses(path: str, experts: float) -> None:
    body = load_causal_lm(path, dtype=torch.float32, device=CPU, flag="--model").model.named_parameters()
    matrices = {name: weight.numel() for name, weight in body if weight.ndim > 1 and "embed" not in name}
    used = sum(count * (experts if "experts" in name else 1) for name, count in matrices.items())
    found = measured(path)
    assert found.flops == pytest.approx(2 * used, rel=0.01)
    assert found.recomputed < 0.01 * found.flops, "the backward pass has two products for each"


@pytest.mark.parametrize("architecture", ["llama"])
def test_on_a_gpu_queries_are_not_copied(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = measured(path)
    monkeypatch.setattr(uncomputed, "has_varlen", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert measured(path, torch.device("cuda")).scored[-1] < copied.scored[-1]


@pytest.mark.parametrize("architecture", ["bloom"])
def test_padded_sequences_have_whole_scores(path: str) -> None:
    found = measured(path)
    assert found.padded
    assert found.trained[0][0] == LENGTH


@pytest.mark.parametrize("architecture", ["llama"])
def test_a_model_that_asks_for_numbers_is_not_measured(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    monkeypatch.setattr(pass_memory, "backbone", lambda model: asks)
    assert measured_passes(path, dtype=torch.float32, device=CPU, longest=LENGTH) is None
