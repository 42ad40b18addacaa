"""Checks that training computes the same as a transformers model.

A freshly loaded model is compared with itself: its own forward pass over one sequence at a time, and a pack of
sequences of several lengths that share a beginning; where that differs, padded sequences. Limits in the configuration,
such as sliding windows, are lowered meanwhile, so that short sequences exceed them. The comparison costs three forward
passes of at most 40 tokens: each reads the weights once, which for a model of 7 billion parameters in bfloat16 takes
about 10 ms on a GPU and 1 s on a CPU.
Does not own: decoding, which the engine compares itself.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.heads.logits import logit_form
from rollgrad.adapters.models.torch.layers.attention import (
    ForestAttention,
    backbone,
    check_layers,
    install_attention,
    use_attention,
)
from rollgrad.adapters.models.torch.layers.layout import prefill_layout
from rollgrad.adapters.models.torch.layers.norms import install_norms
from rollgrad.adapters.models.torch.layers.padded import (
    check_rows,
    is_padded,
    mark_padded,
    padded_hidden,
    use_fast_attention,
    use_own_attention,
)
from rollgrad.adapters.models.torch.layers.recurrent_layers import check_planned
from rollgrad.adapters.models.torch.loading.weight_shards import together
from rollgrad.domain.errors import ConfigurationError

LONG, SHORT, SHARED = 24, 16, 3
"""Lengths of the two sequences that are compared, and of their common beginning, in tokens."""

LOWERED = 5
"""Width of sliding windows and of chunks during the comparison."""

LIMITS = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "floor_scale")
"""Names that configurations and layers give to the width of a window or a chunk, and to the positions up to which
queries are not scaled (`query_scales.py`)."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest `logit_gap` that rounding explains."""

NOISE = 3.0
"""Factor by which the rounding errors of all layers may exceed the effect of one rounding step of the embeddings."""

LENGTH_DEPENDENT = ("longrope", "dynamic")
"""Rotary embeddings whose angles depend on the longest sequence of a forward pass, if that exceeds a limit."""


def install_and_compare(model: Any) -> None:
    """Installs packed attention in a causal language model and compares; a model that cannot be packed is computed
    padded (`padded.py`), which is compared too.

    Raises:
        ConfigurationError: it cannot be computed padded either; the message is a reason, which names neither the model
            nor a setting.
        FloatingPointError: its own logits are not finite.
        Exception: packed attention itself fails, which no model is to blame for.
    """
    sequences = probe_tokens(model)
    try:
        check_layers(model)
        with torch.no_grad(), foreign_code(), lowered_limits(model):
            if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
                use_attention(model, "eager")  # transformers has SDPA leave out the caps without a word
            expected = own_logits(model, sequences)
            install_attention(model)
            compare(model, sequences, expected)
    except ConfigurationError as error:
        _compare_padded(model, sequences, reason=str(error))


def _compare_padded(model: Any, sequences: Sequence[tuple[int, ...]], *, reason: str) -> None:
    """Has a model computed padded; `reason` is why it cannot be packed."""
    check_rows(model)
    with torch.no_grad(), foreign_code(), lowered_limits(model):
        use_own_attention(model)
        expected = own_logits(model, sequences)
        mark_padded(model, reason)
        install_norms(model)
        try:
            with foreign_code():
                use_fast_attention(model)
                compare(model, sequences, expected)
        except ConfigurationError:
            use_own_attention(model)
            compare(model, sequences, expected)


def own_logits(model: Any, sequences: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Returns logits_TV of each sequence by the model's own forward pass over it alone, float32.

    Raises:
        FloatingPointError: they are not finite.
    """
    logits = [plain_logits(model, tokens) for tokens in sequences]
    if not all(bool(logits_TV.isfinite().all()) for logits_TV in logits):
        raise FloatingPointError
    return logits


def compare(model: Any, sequences: Sequence[tuple[int, ...]], expected: Sequence[Tensor]) -> None:
    """Compares the logits of sequences that are computed together with the `expected` ones.

    Raises:
        ConfigurationError: they differ by more than rounding.
    """
    found = joint_logits(model, sequences)
    gap = max(logit_gap(f_TV, e_TV) for f_TV, e_TV in zip(found, expected, strict=True))
    allowed = allowed_gap(model, sequences, gap)
    if not gap <= allowed:
        how = "padded" if is_padded(model) else "packed"
        raise ConfigurationError(
            f"logits of {how} sequences differ from its own by {gap:.2g} of their spread, more than rounding's "
            f"{allowed:.2g}."
        )


def allowed_gap(model: Any, sequences: Sequence[tuple[int, ...]], gap: float) -> float:
    """Returns the largest `logit_gap` that rounding explains. If `gap` exceeds the usual bound in a coarse format, it
    is measured: some models (mixtures of experts with large random weights) amplify every rounding error."""
    dtype = next(model.parameters()).dtype
    if gap <= TOLERANCE[dtype] or dtype == torch.float32:
        return TOLERANCE[dtype]
    exact = joint_logits(model, sequences)
    step = torch.finfo(dtype).eps

    def disturb(module: Any, inputs: Any, output: Tensor) -> Tensor:
        signs = (torch.arange(output.numel(), device=output.device) % 7 < 4).view(output.shape)
        return torch.where(signs, output * (1 + step), output * (1 - step))

    handle = model.get_input_embeddings().register_forward_hook(disturb)
    try:
        disturbed = joint_logits(model, sequences)
    finally:
        handle.remove()
    return max(TOLERANCE[dtype], NOISE * max(map(logit_gap, disturbed, exact)))


def probe_tokens(model: Any) -> list[tuple[int, ...]]:
    """Returns two sequences of different length with a common beginning, without tokens that stand for images etc."""
    config = model.config.get_text_config()
    special = {
        token
        for settings in (model.config, config)
        for name, value in settings.to_dict().items()
        if "_token" in name
        for token in (value if isinstance(value, list) else [value])
    }
    usual = [token for token in range(min(config.vocab_size, 1000)) if token not in special]
    tokens = [usual[(7 + 13 * index) % len(usual)] for index in range(LONG + SHORT)]
    return [tuple(tokens[:LONG]), tuple(tokens[:SHARED] + tokens[LONG + SHARED :])]


def plain_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Returns logits_TV of one sequence by the model's own forward pass, float32."""
    logits: Tensor = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
    return logits.float()


def logit_gap(found_TV: Tensor, expected_TV: Tensor) -> float:
    """Returns, for the median token, the root mean square of the logits' difference as a share of their standard
    deviation.

    The median is used because rounding makes the routers of a mixture choose another expert for a few tokens, while an
    error of attention affects most tokens.
    """
    difference_T = (found_TV - expected_TV).square().mean(-1).sqrt()
    gap = (difference_T / expected_TV.std(-1).clamp(min=torch.finfo(torch.float32).tiny)).median()
    return float(gap) if bool(found_TV.isfinite().all()) else float("inf")


def joint_logits(model: Any, sequences: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Returns logits_TV of each sequence, by one pass over all of them, which share a beginning; float32."""
    head, form = model.get_output_embeddings(), logit_form(model)
    if is_padded(model):
        hidden = dict(padded_hidden(model, [torch.tensor(tokens) for tokens in sequences]))
        return [form.logits(hidden[index], together(head.weight), head.bias) for index in range(len(sequences))]
    layout, leaves = prefill_layout(sequences)
    weight = next(model.parameters())
    plan = ForestAttention(layout.nodes, device=weight.device, dtype=weight.dtype)
    hidden_MH = backbone(model)(
        input_ids=layout.tokens_M[None].to(weight.device),
        position_ids=layout.positions_M[None].to(weight.device),
        use_cache=False,
        attention_plan=plan,
    ).last_hidden_state[0]
    check_planned(model, plan.recurrence.calls)
    backbone(model).state_heads = plan.recurrence.heads  # processes may have to divide them
    logits_MV = form.logits(hidden_MH, together(head.weight), head.bias)
    beginning = range(SHARED)
    return [logits_MV[[*beginning, *range(leaf.start, leaf.start + leaf.length)]] for leaf in leaves]


@contextmanager
def lowered_limits(model: Any) -> Iterator[None]:
    """Makes every sliding window and every chunk a few tokens wide inside the block."""
    places = {id(place): place for part in model.modules() for place in (part, getattr(part, "config", None))}
    places |= {id(place): place for place in (model.config, model.config.get_text_config())}
    before = []
    for place in places.values():
        for name in LIMITS:
            value = vars(place).get(name) if place is not None else None
            if isinstance(value, int) and value > LOWERED:
                before.append((place, name, value))
    try:
        for place, name, _ in before:
            setattr(place, name, LOWERED)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


@contextmanager
def foreign_code() -> Iterator[None]:
    """Turns any exception of a model's code into a reason in one sentence; lack of memory passes unchanged, and so does
    an exception of rollgrad's own code that the model's calls: a slower way around a defect would hide it."""
    try:
        yield
    except (ConfigurationError, FloatingPointError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if _is_own(error):
            error.add_note("It is rollgrad's own code that failed, not the model's: a defect, please report it.")
            raise
        line = str(error).strip().split("\n")[0][:200]
        raise ConfigurationError(f"its code raises {type(error).__name__}: {line.rstrip('.')}.") from error


def _is_own(error: Exception) -> bool:
    """Returns whether rollgrad's own code raised an error, or called torch, which raised it. This module and that of
    `logit_form` do not count: they read what a model returns, so that the error may be the model's."""
    modules: list[str] = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = [name for name in modules if name.partition(".")[0] != "torch"][-1]
    return last.startswith("rollgrad.") and last not in (__name__, logit_form.__module__)


def usable_positions(config: Any) -> int | None:
    """Returns the largest number of tokens of a sequence: the model's positions, but no more than its rotary embedding
    keeps its angles for; None if the settings name no number."""
    text = config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None)]
    limits += [rope.get("original_max_position_embeddings") for rope in _ropes(text) if rope["rope_type"] == "longrope"]
    return min((limit for limit in limits if limit is not None), default=None)


def check_positions(model: Any, longest: int) -> None:
    """Checks that rotary angles do not depend on the other sequences of a pack, whose longest has `longest` tokens.

    Raises:
        ConfigurationError: `longest` exceeds the limit from which on they do.
    """
    text = model.config.get_text_config()
    kinds = length_dependent_positions(model)
    limit = usable_positions(text)
    if kinds and limit is not None and longest > limit:
        raise ConfigurationError(
            f"A sequence has {longest} tokens, but beyond {limit} the rotary embedding of {type(model).__name__} "
            f"({kinds[0]}) would change for the others of its pack too: set --data.max_len {limit}."
        )


def length_dependent_positions(model: Any) -> list[str]:
    """Returns the kinds of the model's rotary embeddings whose angles depend on the longest sequence of a pass."""
    return sorted({rope["rope_type"] for rope in _ropes(model.config.get_text_config())} & set(LENGTH_DEPENDENT))


def _ropes(text: Any) -> list[dict[str, Any]]:
    """Returns the settings of the rotary embeddings: one, or one for each kind of layer."""
    settings = getattr(text, "rope_parameters", None) or {}
    found = [settings] if "rope_type" in settings else list(settings.values())
    return [rope for rope in found if isinstance(rope, dict) and "rope_type" in rope]
