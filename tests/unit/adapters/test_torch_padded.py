"""Models that cannot be packed are computed with padding: the same results, whatever the rows and passes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.models.deepspeed.tensor_parallel import divided
from rollgrad.adapters.models.torch.adapter_dropout import AdapterDropout
from rollgrad.adapters.models.torch.forward import PackedLM, PackedValue
from rollgrad.adapters.models.torch.kernels import row_widths
from rollgrad.adapters.models.torch.layers import padded, sequence_parallel
from rollgrad.adapters.models.torch.layers.padded import (
    is_padded,
    mark_padded,
    padded_hidden,
    padded_layout,
    use_fast_attention,
)
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.recomputation import Recomputation, recompute_layers
from rollgrad.adapters.models.torch.references import AdapterlessReference, TorchReference
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.errors import ConfigurationError
from tests.fakes import cluster
from tests.model_sweep import episodes
from tests.tiny_architectures import tiny_model

FLAG = "--actor.model_name_or_path"


def load(path: Path, *, pads: bool = True) -> Any:
    model = load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    if pads and not is_padded(model):
        use_fast_attention(model)
        mark_padded(model, "a test says so")
    return model


@pytest.fixture(params=[1, row_widths.SMALL_PASS], ids=["several passes", "one pass"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(row_widths, "SMALL_PASS", request.param)
    if request.param == 1:
        monkeypatch.setattr(row_widths, "PADDING_TOLERANCE", 1.0)
    return int(request.param)


def test_padding_changes_neither_scores_nor_gradients_nor_routers(tiny_mixture_dir: Path, passes: int) -> None:
    batch, found = cluster.batch(), []
    for pads in (True, False):
        model = load(tiny_mixture_dir, pads=pads)
        *columns, tokens_E, probabilities_E, squares = PackedLM(model, temperature=0.7, correct=True)(batch, True)
        (columns[0].sum() + probabilities_E[0] + squares).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append([*columns, tokens_E, probabilities_E, squares, *gradients])
    for mine, packed in zip(*found, strict=True):
        torch.testing.assert_close(mine, packed, rtol=1e-3, atol=1e-4)


def test_values_of_padded_tokens_are_those_of_packed_ones(tiny_model_dir: Path, passes: int) -> None:
    head = {"weight": torch.linspace(-1, 1, load(tiny_model_dir).config.hidden_size)[None], "bias": torch.ones(1)}
    mine, packed = (PackedValue(load(tiny_model_dir, pads=pads), head)(cluster.batch()) for pads in (True, False))
    torch.testing.assert_close(mine, packed, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("passes")
def test_hidden_states_are_those_of_each_sequence_alone_however_few_rows_a_pass_has(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded, "MOST_TOKENS", 6)  # fewer than the longest row has
    model, chance = load(tiny_model_dir), torch.Generator().manual_seed(0)
    sequences = [torch.randint(5, 200, (length,), generator=chance) for length in (2, 9, 2, 5, 2, 2, 3)]
    with torch.no_grad():
        found = list(padded_hidden(model, sequences))
        assert sorted(index for index, _ in found) == list(range(len(sequences)))
        for index, hidden_TH in found:
            alone = model.model(input_ids=sequences[index][None], use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(hidden_TH, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pads", [True, False])
def test_models_say_whether_they_are_computed_padded(tiny_model_dir: Path, pads: bool) -> None:
    tokenizer, settings = load_tokenizer(str(tiny_model_dir), flag=FLAG), OptimizerSettings(lr=1e-2)
    policy = TorchPolicy(load(tiny_model_dir, pads=pads), tokenizer, settings)
    critic = TorchValue(load(tiny_model_dir, pads=pads), tokenizer, settings)
    reference = TorchReference(load(tiny_model_dir, pads=pads))
    models = (policy, critic, reference, AdapterlessReference(policy))
    assert [model.padded() for model in models] == [pads] * 4


def test_rows_are_as_wide_as_the_tolerance_lets_them_be(tiny_model_dir: Path, passes: int) -> None:
    batch = episodes(60)
    layout = padded_layout(load(tiny_model_dir), batch)
    assert torch.equal(layout.tokens_M[layout.index_N], batch.tokens_N)
    widths = [node.length for node in layout.nodes]
    lengths = sorted(batch.lengths_S.tolist(), reverse=True)
    assert widths == (lengths if passes == 1 else [lengths[0]] * len(lengths))


def test_processes_that_share_weights_make_one_pass_each(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_widths, "SMALL_PASS", 1)
    monkeypatch.setattr(row_widths, "PADDING_TOLERANCE", 1.0)
    model, batch = load(tiny_model_dir), episodes(60)
    next(model.parameters()).ds_id = 0  # of a parameter that ZeRO divides
    assert {node.length for node in padded_layout(model, batch).nodes} == {int(batch.lengths_S.max())}


def test_noise_on_embeddings_does_not_depend_on_the_passes(tiny_model_dir: Path, passes: int) -> None:
    batch, taken = cluster.batch(), []
    for parts in ([[0, 1, 2, 3, 4]], [[3], [0, 4], [1, 2]]):
        settings = OptimizerSettings(lr=1e-2, max_norm=0.0)
        tokenizer = load_tokenizer(str(tiny_model_dir), flag=FLAG)
        policy = TorchPolicy(load(tiny_model_dir), tokenizer, settings, neftune_alpha=5.0)
        policy.update([batch.select(part) for part in parts], cluster.likelihood)
        taken.append([weight.clone() for _, weight in policy.weights()])
    for whole, divided_ in zip(*taken, strict=True):
        torch.testing.assert_close(whole, divided_, rtol=1e-4, atol=1e-5)


def test_what_processes_cannot_divide_is_a_sentence(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = PackedLM(load(tiny_model_dir))
    with pytest.raises(ConfigurationError, match=r"computed with padding.*leave --ds\.tensor_parallel_size out"):
        divided(module, size=2)
    monkeypatch.setattr(sequence_parallel, "_joined", sequence_parallel.SequenceGroup(size=2))
    with pytest.raises(ConfigurationError, match=r"computed with padding.*leave --ds\.sequence_parallel_size out"):
        PackedLM(module.model)


def test_the_reason_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("bloom").save_pretrained(tmp_path)
    assert is_padded(load(tmp_path))
    told = capsys.readouterr()
    assert "BloomForCausalLM is computed with padding" in told.out + told.err
    assert "attention interface" in told.out + told.err


@pytest.mark.parametrize("model_type", ["opt", "bart", "gemma2"])
def test_nothing_is_left_out_in_training(model_type: str, tmp_path: Path) -> None:
    """Neither by modules nor by functions, of whole layers neither."""
    rates = ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "decoder_layerdrop")
    known = tiny_model(model_type).config.to_dict()
    tiny_model(model_type, **{name: 0.5 for name in rates if name in known}).save_pretrained(tmp_path)
    module = PackedLM(load(tmp_path, pads=False))
    batch = episodes(40)
    with torch.no_grad():
        expected, _ = module(batch)
        Recomputation(module.model, AdapterDropout(module.model), Checkpointing.FULL)
        recompute_layers(module.model)
        found, _ = module(batch)
    assert any(part.training for part in module.model.modules())
    torch.testing.assert_close(found, expected)
