"""Layers that hand a state from token to token are packed: values and gradients are those of each sequence alone."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional

from rollgrad.adapters.models.deepspeed.tensor_parallel import divided
from rollgrad.adapters.models.torch.forward import PackedLM, PackedReward, PackedValue
from rollgrad.adapters.models.torch.kernels import row_widths
from rollgrad.adapters.models.torch.layers import recurrent_layers, sequence_parallel
from rollgrad.adapters.models.torch.layers.layout import Node, build_layout
from rollgrad.adapters.models.torch.layers.padded import is_padded, mark_padded, use_fast_attention
from rollgrad.adapters.models.torch.layers.recurrence import ForestRecurrence, Segment, segments
from rollgrad.adapters.models.torch.loading.compatibility import install_and_compare
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.planning.shape import model_shape
from rollgrad.application.settings.sections.actor import AdapterConfig
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.errors import ConfigurationError
from rollgrad.testing.agent_executor import make_trajectory
from tests.model_sweep import GRADIENT_TOLERANCE, LOGPROB_TOLERANCE, packed_gaps
from tests.recomputed import recompute
from tests.tiny_architectures import VOCABULARY, tiny_model

FAMILIES = ("qwen3_next", "olmo_hybrid", "kimi_linear", "lfm2", "nemotron_h", "falcon_h1", "mamba2", "jamba")
"""For each recurrence, and each way in which code of transformers calls one. Zamba and Mamba are computed where their
kernel is a pretended one."""
ALIKE = (
    *("qwen3_5_text", "qwen3_5_moe", "lfm2_moe", "bamba", "granitemoehybrid", "zamba2", "mamba", "falcon_mamba"),
    "zamba",
)
"""Types whose recurrence, and how it is called, is that of others."""
WIDTH = 4
"""Tokens that a convolution sees."""


MANY, FEW = 1, row_widths.SMALL_PASS
"""Tokens of a pass whose rows are cut into as few calls as there may be: many calls where each pass has more."""


@pytest.fixture(params=[MANY, FEW], ids=["many calls", "few calls"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_widths, "SMALL_PASS", request.param)
    if request.param == 1:
        monkeypatch.setattr(row_widths, "PADDING_TOLERANCE", 1.0)


def forest(seed: int = 0, longest: int = 90) -> PackedBatch:
    """Replies to one prompt that part after 0, 1, 3 and 4 tokens, of which some part again; one reply is the beginning
    of another, some have one token; a prompt that is another's beginning; one of a single token; a group of one."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 79, (count,), generator=draw).tolist()

    prompt, begun, short = tokens(11), tokens(20), tokens(2)
    replies = [
        begun + tokens(longest - 31),
        begun,
        begun[:3] + tokens(17),
        begun[:4] + tokens(1),
        [*begun[:1], 80, *tokens(9)],
        [80],
        [81, *tokens(5)],
        [*begun[:4], 82, *tokens(6)],
        [*begun[:4], 82, *tokens(2)],
    ]
    made = [make_trajectory(prompt, reply, group_id=0, sample_id=i) for i, reply in enumerate(replies)]
    made.append(make_trajectory([*prompt, *begun[:9]], tokens(4), tokens(3), tokens(6), group_id=0, sample_id=9))
    made += [make_trajectory(short, tokens(count), group_id=1, sample_id=10 + count) for count in (1, 70, 2)]
    made += [make_trajectory([7], tokens(5), group_id=2, sample_id=i) for i in range(2)]
    return pack([*made, make_trajectory(tokens(5), tokens(40), group_id=3)])


def test_nodes_are_cut_where_others_branch_off() -> None:
    nodes = (
        Node(0, 10),
        Node(10, 4, ((0, 6),)),
        Node(14, 1, ((0, 6), (10, 2))),
        Node(15, 3, ((0, 10),)),
        Node(18, 2, ((0, 3),)),
        Node(20, 5),
    )
    assert segments(nodes) == [
        Segment(0, 3, None),
        Segment(3, 3, 0),
        Segment(6, 4, 1),
        Segment(10, 2, 1),
        Segment(12, 2, 3),
        Segment(14, 1, 3),
        Segment(15, 3, 2),
        Segment(18, 2, 0),
        Segment(20, 5, None),
    ]


def test_what_nothing_waits_for_is_computed_together() -> None:
    """Eight replies that part one token later each: a call for each token that others wait for, one for the rest."""
    nodes = [Node(0, 40), *(Node(40 + 30 * i, 30, ((0, 10 + i),)) for i in range(7))]
    rows: list[int] = []

    def scan(columns: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        rows.append(len(columns[0]))
        return columns[0], columns[0][:, 0]

    x_1MC = torch.rand(1, 250, 2)
    found = ForestRecurrence(nodes, device=torch.device("cpu")).scan(scan, [x_1MC])
    assert torch.equal(found, x_1MC)
    assert rows == [1] * 7 + [8]


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("seed", range(3))
def test_a_token_comes_after_those_of_its_path(seed: int) -> None:
    """Against convolution and recurrence of each sequence alone, in float64."""
    batch = forest(seed)
    layout = build_layout(batch)
    recurrence = ForestRecurrence(layout.nodes, device=torch.device("cpu"))
    torch.manual_seed(seed)
    x_MC = torch.randn(len(layout.tokens_M), 3, dtype=torch.float64, requires_grad=True)
    decay_MC = torch.rand(len(layout.tokens_M), 3, dtype=torch.float64).requires_grad_()
    weight_C1W = torch.randn(3, 1, WIDTH, dtype=torch.float64)

    def convolution(rows: Tensor) -> Tensor:
        return functional.conv1d(functional.pad(rows, (WIDTH - 1, 0)), weight_C1W, groups=3)

    def scan(columns: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        x_RTC, forgotten_RTC = columns
        state = torch.zeros_like(x_RTC[:, 0]) if state is None else state
        states = []
        for x_RC, forgotten_RC in zip(x_RTC.unbind(1), forgotten_RTC.unbind(1), strict=True):
            state = state * (1 - forgotten_RC) + x_RC
            states.append(state)
        return torch.stack(states, 1), state

    def both(x: Tensor, decay: Tensor, make: Any) -> Tensor:
        mixed = make.convolve(convolution, x.transpose(1, 2), WIDTH).transpose(1, 2)
        scanned: Tensor = make.scan(scan, [mixed, decay])
        return scanned

    class Alone:
        def convolve(self, convolution: Any, x: Tensor, width: int) -> Any:
            return convolution(x)

        def scan(self, scan: Any, columns: Any) -> Any:
            return scan(columns, None)[0]

    found_NC = both(x_MC[None], decay_MC[None], recurrence)[0][layout.index_N]
    lengths = batch.lengths_S.tolist()
    paths = torch.split(layout.index_N, lengths)
    expected_NC = torch.cat([both(x_MC[path][None], decay_MC[path][None], Alone())[0] for path in paths])
    torch.testing.assert_close(found_NC, expected_NC)
    weights_NC = torch.randn_like(found_NC)
    gradients = [torch.autograd.grad((weights_NC * y_NC).sum(), (x_MC, decay_MC)) for y_NC in (found_NC, expected_NC)]
    torch.testing.assert_close(*gradients)


def made(model_type: str, *, recomputes: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model as it is, and packed."""
    plain, model = (tiny_model(model_type).to(dtype) for _ in range(2))
    plain.set_attn_implementation("eager")
    install_and_compare(model)
    assert not is_padded(model)
    if recomputes:
        recompute(model)
    return plain, model


@pytest.mark.parametrize("model_type", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.wide) for name in ALIKE)])
def test_a_forest_has_the_values_and_gradients_of_its_sequences(model_type: str) -> None:
    value_gap, gradient_gap = packed_gaps(*made(model_type), forest())
    assert value_gap < LOGPROB_TOLERANCE
    assert gradient_gap < GRADIENT_TOLERANCE


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("calls", "model_type"),
    [
        *((FEW, "qwen3_5_text"), (MANY, "kimi_linear"), (MANY, "lfm2"), (FEW, "bamba"), (MANY, "jamba")),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in [
                *((MANY, "qwen3_5_text"), (FEW, "kimi_linear"), (FEW, "lfm2"), (MANY, "bamba"), (FEW, "jamba")),
                *((calls, model_type) for calls in (MANY, FEW) for model_type in ("mamba", "zamba")),
            ]
        ),
    ],
    indirect=["calls"],
)
def test_so_it_has_where_layers_are_computed_again_for_gradients(model_type: str) -> None:
    value_gap, gradient_gap = packed_gaps(*made(model_type, recomputes=True), forest(1))
    assert value_gap < LOGPROB_TOLERANCE
    assert gradient_gap < GRADIENT_TOLERANCE


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "lfm2", "nemotron_h"])
def test_bfloat16_rounds_no_more_than_transformers_does(model_type: str) -> None:
    plain, model = made(model_type, dtype=torch.bfloat16)
    exact, batch = tiny_model(model_type).to(torch.bfloat16).float(), forest(2)
    with torch.no_grad():
        found_A = PackedLM(model)(batch)[0]
        rounded_A, exact_A = (alone(each, batch) for each in (plain, exact))
    assert (found_A - exact_A).square().mean() < 1.5 * (rounded_A - exact_A).square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.wide)], ids=str)
@pytest.mark.parametrize("model_type", ["mamba2", "mamba"])
def test_half_precision_below_hidden_states_in_float32(model_type: str, dtype: torch.dtype) -> None:
    """The residuals of Mamba stay in float32 beside weights and a head in half precision: log-probs and gradients are
    as far from exact ones as transformers' own."""
    plain, model, exact = [tiny_model(model_type).to(dtype) for _ in range(3)]
    install_and_compare(model)
    exact.float()
    batch = forest(2, longest=40)
    found = [PackedLM(model)(batch)[0], *(alone(each, batch) for each in (plain, exact))]
    rest_A = torch.linspace(-1, 1, len(found[0]))
    for logprobs_A in found:
        (rest_A * logprobs_A).sum().backward()
    gradients = [torch.cat([p.grad.float().flatten() for p in each.parameters()]) for each in (model, plain, exact)]
    for mine, theirs, right in (found, gradients):
        assert (mine - right).square().mean() < 1.5 * (theirs - right).square().mean()


def alone(model: Any, batch: PackedBatch) -> Tensor:
    """Log-probs of the action tokens, one sequence at a time."""
    found = []
    for start, length in zip(batch.starts_S.tolist(), batch.lengths_S.tolist(), strict=True):
        tokens_T = batch.tokens_N[start : start + length]
        logprobs_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs_TV.gather(1, tokens_T[1:, None])[:, 0][batch.action_mask_N[start + 1 : start + length]])
    return torch.cat(found)


@pytest.mark.parametrize("kind", [PackedValue, PackedReward])
def test_values_and_rewards_are_those_of_padded_sequences(kind: type[PackedValue]) -> None:
    found = []
    for pads in (True, False):
        _, model = made("qwen3_5_text")
        if pads:
            use_fast_attention(model)
            mark_padded(model, "a test says so")
        head = {"weight": torch.linspace(-1, 1, model.config.hidden_size)[None]}
        module = kind(model, head | ({"bias": torch.ones(1)} if kind.with_bias else {}))
        values_A = module(forest())
        (values_A * torch.linspace(-1, 1, len(values_A))).sum().backward()
        found.append([values_A.detach(), *(p.grad for p in module.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found, rtol=1e-3, atol=2e-4)


def test_adapters_and_routers_are_those_of_padded_sequences() -> None:
    """LoRA on projections of the recurrence, and the sums of a balance loss, in which a shared token counts for each of
    its sequences."""
    found = []
    batch = forest()
    batch = evolve(batch, loss_weights_N=torch.where(batch.action_mask_N, 0.1, 0.0))
    for pads in (True, False):
        _, model = made("qwen3_next")
        if pads:
            use_fast_attention(model)
            mark_padded(model, "a test says so")
        add_lora(model, AdapterConfig(rank=4, target_modules=("in_proj_qkvz", "out_proj", "q_proj")), seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
        columns = PackedLM(model)(batch, True)
        (columns[0].mean() + columns[-2][0] / 100).backward()
        trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
        assert any("linear_attn" in name for name in trained)
        found.append([*(column.detach() for column in columns), *trained.values()])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_a_recurrence_that_is_no_function_is_padded(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("minimax")
    install_and_compare(model)
    assert is_padded(model)
    told = capsys.readouterr()
    assert "whose recurrence packed training does not know" in told.out + told.err


@pytest.mark.parametrize("states_at_once", [1, 3, 4])
def test_states_of_mamba_are_carried_some_numbers_at_a_time(
    states_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_RCT, A_CN = torch.rand(2, 3, 5).cumsum(2), -torch.rand(3, 4)
    monkeypatch.setattr(recurrent_layers, "MOST_DECAYS", states_at_once * passed_RCT.numel())
    given = [x.requires_grad_() for x in (passed_RCT, A_CN, torch.randn(2, 4, 5), torch.randn(2, 3, 4))]
    found_RCT = recurrent_layers._of_state(*given)
    decays_RCTN = torch.exp(passed_RCT[..., None] * A_CN[:, None])
    expected_RCT = torch.einsum("rctn,rcn,rnt->rct", decays_RCTN, given[3], given[2])
    torch.testing.assert_close(found_RCT, expected_RCT)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), given) for x in (found_RCT, expected_RCT)))


@pytest.mark.parametrize("model_type", ["mamba", "zamba"])
def test_states_of_mamba_have_the_gradient_that_its_kernel_leaves_out(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mamba_ssm says so of its `selective_scan_fn`, which transformers takes on a GPU, and whose sequences, inputs and
    results have one number format."""
    plain, model = made(model_type)
    planned = vars(sys.modules[type(model).__module__])["mamba_selective_scan"]
    own = planned._own

    def kernel(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, **named: Any) -> Any:
        assert {u.dtype, delta.dtype, B.dtype, C.dtype} == {torch.float32}
        result = own(u, delta, A, B, C, **named)
        return (result[0], result[1].detach()) if named["return_last_state"] else result

    monkeypatch.setattr(planned, "_own", kernel)
    value_gap, gradient_gap = packed_gaps(plain, model, forest(longest=40))
    assert value_gap < LOGPROB_TOLERANCE
    assert gradient_gap < GRADIENT_TOLERANCE


def test_a_layer_that_does_not_get_the_plan_is_padded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("qwen3_5_text")
    layer = next(part for part in model.modules() if type(part).__name__.endswith("GatedDeltaNet"))
    own = layer.forward
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **_: own(hidden_states=hidden_states))
    install_and_compare(model)
    assert is_padded(model)
    told = capsys.readouterr()
    assert "hand keywords on" in told.out + told.err


def test_without_a_plan_a_model_is_transformers_own() -> None:
    """Its cache too."""
    plain, model = made("qwen3_5_text")
    for each in (plain, model):
        each.set_attn_implementation("sdpa")
    tokens = torch.arange(3, 20)[None] % VOCABULARY
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(tokens, **settings), plain.generate(tokens, **settings))
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_layers_that_hand_a_state_on_are_not_divided_by_layer() -> None:
    module = PackedLM(made("qwen3_5_text")[1])
    with pytest.raises(ConfigurationError, match=r"a state from token to token.*leave --ds\.tensor_parallel_size out"):
        divided(module, size=2)


@pytest.mark.parametrize(
    ("model_type", "heads"), [("qwen3_5_text", 2), ("nemotron_h", 4), ("mamba2", 4), ("jamba", 64), ("lfm2", 0)]
)
def test_heads_that_processes_do_not_divide_are_a_sentence(
    model_type: str, heads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a dry run and where a model is made. A convolution needs no heads."""
    key, path = "actor.model_name_or_path", str(tmp_path)
    model = made(model_type)[1]
    model.save_pretrained(path)
    for size in (2, 3):
        monkeypatch.setattr(sequence_parallel, "_joined", sequence_parallel.SequenceGroup(size=size))
        if heads % size == 0:
            assert PackedLM(model).group.run > 1
            model_shape(key, path, sequence_parallel_size=size)
            continue
        refused = pytest.raises(
            ConfigurationError, match=f"is 3, .* has {heads}: set --ds.sequence_parallel_size to a divisor of {heads}"
        )
        with refused:
            PackedLM(model)
        with refused:
            PackedValue(model, {})
        with refused:
            model_shape(key, path, sequence_parallel_size=size)
        assert model_shape("reward.model_name_or_path", path, sequence_parallel_size=size).state_bytes
