"""The comparison at loading: it finds what is wrong in every format, and takes no rounding for a fault."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.engines.embedded import decoding, plans
from rollgrad.adapters.engines.embedded.decoding import check_decoding
from rollgrad.adapters.models.torch.heads.logits import LogitForm, logit_form
from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.layers import attention
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.loading.compatibility import check_positions
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.planning.shape import model_shape
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.composition.models import make_actor_model, make_reference_model
from rollgrad.testing.agent_executor import make_trajectory
from tests.tiny_architectures import tiny_model

FLAG = "--critic.model_name_or_path"
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_causal_lm(str(path), dtype=dtype, device=torch.device("cpu"), flag=FLAG)


@pytest.fixture
def windowed(tmp_path: Path) -> Path:
    """A model whose window is wider than every sequence that is compared."""
    tiny_model("mistral", sliding_window=100).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("fault", ["window", "scale", "neighbours"])
def test_attention_that_sees_other_tokens_is_found(
    windowed: Path,
    fault: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = attention.attention_forward

    def wrong(module: Any, query: Any, key: Any, value: Any, mask: Any, **settings: Any) -> Any:
        if fault == "window":
            settings["sliding_window"], mask = None, None
        elif fault == "scale":
            settings["scaling"] = 0.1 * query.shape[-1] ** -0.5
        else:  # keys of the neighbour in the pack
            key, value = key.roll(9, dims=2), value.roll(9, dims=2)
        return right(module, query, key, value, mask, **settings)

    monkeypatch.setattr(attention, "attention_forward", wrong)
    assert is_padded(load(windowed, dtype))
    told = capsys.readouterr()
    assert "logits of packed sequences differ" in told.out + told.err


def test_capped_scores_are_compared_with_those_of_the_model_s_own_code(tmp_path: Path) -> None:
    """SDPA, which transformers takes by itself, leaves these caps out."""
    tiny_model("gemma2", attn_logit_softcapping=0.5).save_pretrained(tmp_path)
    assert not is_padded(load(tmp_path))


def test_a_defect_of_packed_attention_is_no_reason_to_pad(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "bucketed", lambda nodes: [])
    with pytest.raises(ValueError, match="non-empty") as found:
        load(windowed)
    assert "rollgrad's own code" in found.value.__notes__[0]


def test_a_model_whose_code_fails_with_packed_attention_is_padded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("doge").save_pretrained(tmp_path)
    assert is_padded(load(tmp_path))
    told = capsys.readouterr()
    assert "its code raises AttributeError" in told.out + told.err


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(("plan", "kind"), [("Prefill", "prefill"), ("Decode", "decoding"), ("Extend", "extension")])
def test_an_engine_that_sees_other_tokens_is_found(
    windowed: Path, plan: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(windowed, dtype)
    check_decoding(model, FLAG)
    right = getattr(plans, plan).attend

    def wrong(self: Any, layer: int, query: Any, key: Any, value: Any, form: ScoreForm) -> Any:
        return right(self, layer, query, key, value, evolve(form, window=1))

    monkeypatch.setattr(getattr(plans, plan), "attend", wrong)
    with pytest.raises(
        ConfigurationError, match=rf"{kind} differ.*choose another --critic.*, or set --an\.engine vllm"
    ):
        check_decoding(model, FLAG, other_engine="--an.engine vllm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_no_fault_where_every_layer_multiplies_it(dtype: torch.dtype, tmp_path: Path) -> None:
    """Large random weights and many routers, each of which chooses others for a rounding."""
    tiny_model("qwen3_moe", num_hidden_layers=12, initializer_range=0.5, num_experts=16).save_pretrained(tmp_path)
    check_decoding(load(tmp_path, dtype), FLAG)


@pytest.mark.parametrize("float32_head", [False, True])
def test_the_actor_the_reference_and_the_engine_have_the_head_that_is_set(float32_head: bool, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = RLConfig()
    config.actor.model_name_or_path, config.actor.dtype = str(tmp_path), DType.BFLOAT16
    config.actor.float32_head = float32_head
    hidden_AH = torch.randn(5, 32, dtype=torch.bfloat16)
    for model in (make_actor_model(config.actor), make_reference_model(config.actor, config.ref)):
        head = model.get_output_embeddings()
        product_AV = hidden_AH.float() @ head.weight.float().t()
        assert logit_form(model).float32 is float32_head
        logits_AV = decoding.Decoder(model)._logits(hidden_AH)
        assert torch.allclose(logits_AV, product_AV, atol=1e-5, rtol=1e-5) is float32_head


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_multiplies_into_float32(dtype: torch.dtype) -> None:
    hidden_AH = torch.randn(3, 4, 64, device="cuda").to(dtype)
    weight_VH, bias_V = torch.randn(100, 64, device="cuda").to(dtype), torch.randn(100, device="cuda").to(dtype)
    found = LogitForm(float32=True).logits(hidden_AH, weight_VH, bias_V)
    expected = torch.nn.functional.linear(hidden_AH.double(), weight_VH.double(), bias_V.double())
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-5)


def test_a_pack_beyond_the_rotary_embedding_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    tiny_model("llama", max_position_embeddings=40, rope_parameters=rope).save_pretrained(tmp_path)
    model = load(tmp_path)
    check_positions(model, 40)
    with pytest.raises(ConfigurationError, match=r"beyond 40 .*dynamic.*--data\.max_len 40"):
        check_positions(model, 41)
    reference, prompt = TorchReference(model), [5] * 20
    reference.score(pack([make_trajectory(prompt, [6] * 20)]))
    with pytest.raises(ConfigurationError, match="beyond 40"):
        reference.score(pack([make_trajectory(prompt, [6] * 21)]))


@pytest.mark.parametrize(
    ("model_type", "kv_heads", "head_dim"),
    [
        ("llama", 2, 8),
        ("deepseek_v3", 4, 16),
        ("gemma4_text", 2, 512),
        ("qwen3_next", 2, 8),
        ("mamba2", 0, 0),
        ("mamba", 0, 0),
        ("jamba", 2, 8),
        ("mimo_v2_flash", 4, 10),
    ],
)
def test_the_plan_knows_the_cache_of_every_kind_of_attention(
    model_type: str, kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    shape = model_shape("actor.model_name_or_path", str(tmp_path))
    assert (shape.kv_heads, shape.head_dim) == (kv_heads, head_dim)


@pytest.mark.parametrize(("model_type", "kv_heads"), [("minimax", 0), ("bloom", 0), ("gemma2", 2)])
def test_the_plan_counts_no_keys_where_sequences_are_computed_anew(
    model_type: str, kv_heads: int, tmp_path: Path
) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    shape = model_shape("ref.model_name_or_path", str(tmp_path))
    assert (shape.layers > 0, shape.hidden, shape.kv_heads) == (True, 32, kv_heads)
