"""Models of vLLM compute on a CPU, once repaired, what its own code for torch does, as its kernels for GPUs do."""

import pytest
import torch

from rollgrad.adapters.engines.vllm.cpu_repairs import repair
from rollgrad.adapters.engines.vllm.loaders import ONE_BY_ONE


@pytest.fixture(autouse=True)
def repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undone after the test."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.sampler import Sampler

    for name in ("forward", "gather_specific_token_logprobs"):
        monkeypatch.setattr(Sampler, name, getattr(Sampler, name))
    monkeypatch.setattr(cpu_triton_utils, "_expand_kernel_impl", cpu_triton_utils._expand_kernel_impl)
    monkeypatch.setattr(rejection_sampler, "apply_top_k_top_p", rejection_sampler.apply_top_k_top_p)
    monkeypatch.setattr(gdn_attention, "_causal_conv1d_fwd_cpu", lambda *, x: x)  # not all processors have the kernel
    monkeypatch.setattr(CPURouter, "__init__", CPURouter.__init__)
    monkeypatch.setattr(_CPUSHMDistributed, "_init_cpu_shm", _CPUSHMDistributed._init_cpu_shm)
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    repair()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("corrected", [True, False])
def test_experts_are_those_with_the_highest_corrected_scores(scores: str, corrected: bool) -> None:
    """DeepSeek-V3, arXiv:2412.19437, equation 16: corrections choose, and weights are the scores without them."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    torch.manual_seed(0)
    logits_NE, bias_E = torch.randn(50, 8), torch.randn(8)
    router = CPURouter(3, 8, scoring_func=scores, e_score_correction_bias=bias_E if corrected else None)
    weights_NK, experts_NK = router._compute_routing(torch.empty(50, 1), logits_NE, None)

    score_NE = logits_NE.double().softmax(-1) if scores == "softmax" else logits_NE.double().sigmoid()
    expected_NK = (score_NE + bias_E if corrected else score_NE).topk(3).indices
    assert torch.equal(experts_NK.long().sort().values, expected_NK.sort().values)
    chosen_NK = score_NE.gather(1, experts_NK.long())
    torch.testing.assert_close(weights_NK.double(), chosen_NK / chosen_NK.sum(-1, keepdim=True), atol=1e-6, rtol=0)


@pytest.mark.parametrize("neighbours", [False, True])
def test_all_heads_of_all_tokens_are_rotated(neighbours: bool) -> None:
    """RoFormer, arXiv:2104.09864, equation 13: as complex numbers, of halves or of neighbours."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        rotary = get_rope(
            32, 64, is_neox_style=not neighbours, rope_parameters={"rope_theta": 1e4}, dtype=torch.float32
        )
    torch.manual_seed(0)
    places_N, queries_NHD, keys_NHD = torch.arange(5), torch.randn(5, 4, 32), torch.randn(5, 2, 32)
    angles_ND = places_N[:, None].double() / 1e4 ** (torch.arange(0, 32, 2).double() / 32)

    def turned(heads_NHD: torch.Tensor) -> torch.Tensor:
        pairs = heads_NHD.double().view(*heads_NHD.shape[:2], *((16, 2) if neighbours else (2, 16)))
        real, imaginary = pairs.unbind(-1 if neighbours else -2)
        made = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles_ND), angles_ND)[:, None]
        return torch.stack((made.real, made.imag), -1 if neighbours else -2).flatten(-2)

    for shape in ((5, -1), (5, -1, 32)):  # heads one after the other, and apart
        given = [heads.reshape(shape).clone() for heads in (queries_NHD, keys_NHD)]
        for found, expected in zip(rotary(places_N, *given), (queries_NHD, keys_NHD), strict=True):
            torch.testing.assert_close(found.view(5, -1, 32).double(), turned(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_convolution_gets_tokens_one_after_the_other(tokens: int) -> None:
    """Torch says of a row that is a part of a wider one that it is contiguous; the kernel reads its strides."""
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _causal_conv1d_fwd_cpu

    rows_NH = torch.randn(tokens, 12)[:, :4].contiguous()
    given_HN = _causal_conv1d_fwd_cpu(x=rows_NH.transpose(0, 1))
    assert given_HN.stride() == (1, 4)
    assert torch.equal(given_HN, rows_NH.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_guesses_have_the_settings_of_their_requests(dtype: torch.dtype) -> None:
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    settings_B, ends_B = torch.tensor([2, 0, 5, 3]).to(dtype), torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    found_N = torch.full((6,), -1, dtype=dtype)
    _expand_kernel_impl(found_N, settings_B, ends_B, 0, 1, 128)
    assert found_N.tolist() == [2, 2, 1, 3, 3, 3]


@pytest.mark.parametrize(("tokens", "left"), [(0, []), (1, [[0.0, float("-inf"), 2.0]])])
def test_among_the_likeliest_of_no_guesses_there_are_none(tokens: int, left: list[list[float]]) -> None:
    from vllm.v1.sample import rejection_sampler

    logits_NV, likeliest_N = torch.tensor([[0.0, -1.0, 2.0]])[:tokens], torch.full((tokens,), 2, dtype=torch.int32)
    assert rejection_sampler.apply_top_k_top_p(logits_NV, likeliest_N, None).tolist() == left


def test_models_that_load_experts_one_by_one_are_vllm_s() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    assert ModelRegistry.get_supported_archs() >= ONE_BY_ONE
