"""The sampler draws from exactly the distribution that its log-probs describe."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.adapters.engines.embedded.sampler import BLOCK, sample
from rollgrad.domain.episodes.generation import SamplingParams

ALMOST_ONE = 1 - 2**-53
"""The largest float64 below 1."""


def reference(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities in float64, written the plain way."""
    logits = logits_V.double() / (params.temperature or 1.0)
    if params.temperature == 0:
        return logits.softmax(-1)
    order = logits.argsort(descending=True).tolist()
    kept = order[: params.top_k or len(order)]
    probs = torch.full_like(logits, -math.inf)
    probs[kept] = logits[kept]
    probs = probs.softmax(-1)
    mass, nucleus = 0.0, []
    for token in kept:
        if nucleus and mass >= params.top_p - 1e-7:  # ties at the edge are the sampler's to break in float32
            break
        nucleus.append(token)
        mass += float(probs[token])
    result = torch.zeros_like(probs)
    result[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return result


def logits_of(vocabulary: int, seed: int, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))


SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=0.7, top_k=10, top_p=0.8),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_k=1000),
]


@pytest.mark.parametrize("vocabulary", [5, BLOCK - 1, BLOCK, BLOCK + 1, 700])
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_logprobs_are_those_of_the_distribution_drawn_from(vocabulary: int, params: SamplingParams) -> None:
    rows = 200
    logits = logits_of(vocabulary, seed=vocabulary)
    uniforms = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = sample(logits.repeat(rows, 1), [params] * rows, uniforms)
    expected = reference(logits, params)
    assert (expected[tokens] > 0).all(), "outside the support"
    torch.testing.assert_close(logprobs, expected.log()[tokens].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [6, 3 * BLOCK + 7])
@pytest.mark.parametrize("params", SETTINGS[:6], ids=str)
def test_frequencies_pass_a_chi_square_test(vocabulary: int, params: SamplingParams) -> None:
    draws = 20_000 if vocabulary < BLOCK else 6_000
    logits = logits_of(vocabulary, seed=3, spread=3.0)
    uniforms = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tokens, _ = sample(logits.repeat(draws, 1), [params] * draws, uniforms)
    expected = draws * reference(logits, params)
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    cells = wanted > 0
    assert not observed[~cells].any()
    statistic = float(((observed - wanted)[cells] ** 2 / wanted[cells]).sum())
    freedom = max(1, int(cells.sum()) - 1)
    # Wilson-Hilferty: the cube root of chi-square / freedom is nearly normal; 4.5 sigma never fails by chance.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4.5


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 600),
    st.integers(0, 10_000),
    st.one_of(st.sampled_from([0.0, 0.999999999, ALMOST_ONE]), st.floats(0, ALMOST_ONE)),
    st.sampled_from(SETTINGS),
)
def test_any_uniform_number_gives_a_token_of_the_support(
    vocabulary: int, seed: int, uniform: float, params: SamplingParams
) -> None:
    logits = logits_of(vocabulary, seed, spread=8.0)
    logits[torch.rand(vocabulary, generator=torch.Generator().manual_seed(seed)) < 0.3] = -math.inf
    logits[seed % vocabulary] = 0.0
    tokens, logprobs = sample(logits[None].clone(), [params], torch.tensor([uniform], dtype=torch.float64))
    assert 0 <= int(tokens) < vocabulary
    assert logits[int(tokens)] > -math.inf
    assert logprobs.isfinite().all()
    assert (logprobs <= 0).all()


def test_the_ends_of_the_unit_interval_are_the_ends_of_the_support() -> None:
    logits = torch.full((2, 1000), -math.inf)
    logits[:, 300:601] = 0.0
    tokens, _ = sample(logits, [SamplingParams()] * 2, torch.tensor([0.0, 0.999999999], dtype=torch.float64))
    assert tokens.tolist() == [300, 600]


def test_greedy_takes_the_most_likely_and_reports_temperature_one() -> None:
    logits = logits_of(50, seed=1)
    params = SamplingParams(temperature=0.0, top_k=2, top_p=0.1)
    tokens, logprobs = sample(logits[None].clone(), [params], torch.tensor([0.9], dtype=torch.float64))
    assert int(tokens) == int(logits.argmax())
    assert float(logprobs) == pytest.approx(float(logits.log_softmax(-1).max()), rel=1e-5)


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-300])
def test_the_coldest_temperatures_take_the_most_likely_token(temperature: float) -> None:
    logits = logits_of(300, seed=3, spread=1e4)
    tokens, logprobs = sample(logits[None].clone(), [SamplingParams(temperature=temperature)], torch.tensor([0.5]))
    assert (tokens.item(), logprobs.item()) == (logits.argmax().item(), 0.0)


def test_neighbours_change_nothing() -> None:
    logits = torch.stack([logits_of(300, seed) for seed in range(len(SETTINGS) + 1)])
    params = [*SETTINGS, SamplingParams(temperature=0.0)]
    uniforms = torch.linspace(0.05, 0.95, len(params), dtype=torch.float64)
    together, logprobs = sample(logits.clone(), params, uniforms)
    for row, param in enumerate(params):
        token, logprob = sample(logits[row : row + 1].clone(), [param], uniforms[row : row + 1])
        assert int(token) == int(together[row])
        torch.testing.assert_close(logprob[0], logprobs[row], rtol=1e-5, atol=1e-6)
