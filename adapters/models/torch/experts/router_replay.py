"""Router replay: a mixture's tokens go to the experts that were recorded when they were sampled, or before an update
(Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370;
Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071).

Routers choose by `torch.topk`, whose result is replaced inside the part of a layer that has the experts: by the
recorded numbers, with the entries at these places as values. All that a router computes of them, its weights of the
experts and their gradient, is so its own.
Invariants: a token without a record goes where its router sends it; activations that are computed again go the same
way. Does not own: who records, nor what is kept of it (`domain/episodes/routed.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollgrad.adapters.models.torch.experts.expert_balance import two_token_pass
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.layers.attention import backbone
from rollgrad.adapters.models.torch.layers.layout import build_layout
from rollgrad.adapters.models.torch.layers.padded import is_padded, padded_layout
from rollgrad.adapters.models.torch.layers.sequence_parallel import SequenceShare
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.routed import experts_type, unrecorded
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import TokenScores

REPLAY = "_rollgrad_router_replay"
"""Attribute of a model's backbone with its `RouterReplay`."""

TOPK = (torch.topk, Tensor.topk)


def install_router_replay(model: Any, setting: str) -> "RouterReplay":
    """Makes the routers of `model` replay experts and say which they choose, from now on; returns by what. Checks that
    by two forward passes of two tokens. `setting` is what asks for it, for errors.

    Raises:
        ConfigurationError: it has no routers whose choice can be replaced.
    """
    if (found := router_replay(model)) is not None:
        return found
    try:
        replay = RouterReplay(model)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{setting}, but {type(model).__name__} {error}: leave --actor.router_replay out."
        ) from error
    setattr(backbone(model), REPLAY, replay)
    return replay


def router_replay(model: Any) -> "RouterReplay | None":
    """Returns what replays the experts of a model, None where nothing does."""
    return getattr(backbone(model), REPLAY, None)


def scored_with_experts(model: Any, batch: PackedBatch, score: Callable[[PackedBatch], TokenScores]) -> TokenScores:
    """Returns the result of `score`, which computes `batch` by `model`, with the experts that its tokens went to."""
    replay = router_replay(model)
    if replay is None:
        return score(batch)
    with replay.recording() as passes:
        scores = score(batch)
    layout = padded_layout(model, batch) if is_padded(model) else build_layout(batch)
    return evolve(scores, experts_NLK=replay.recorded(passes)[layout.index_N])


class RouterReplay:
    """Replays and records the choices of a model's routers; see `install_router_replay`.

    Raises:
        ConfigurationError: they cannot be replaced; it says why, after the model's name.
    """

    def __init__(self, model: Any) -> None:
        self._column_M: Tensor | None = None
        """Experts of the tokens of all passes in turn, [M, L, K]."""
        self._begun = 0
        """Tokens of these whose passes have begun."""
        self._pass_T: Tensor | None = None
        """Experts of the tokens of the pass that is computed; None where routers choose."""
        self._passes: list[dict[int, Tensor]] | None = None
        """Choices [T, K] in each layer of each pass, where they are recorded."""
        self.layers = int(model.config.get_text_config().num_hidden_layers)
        self.routers: dict[int, _Router] = {}
        self._heard: dict[int, _Router] = {}
        """The latest choice in each layer, until it is known what routers choose."""
        blocks = expert_blocks(backbone(model))
        for layer, block in blocks.items():
            block.forward = _Routed(self, layer, block.forward)
        handle = model.get_input_embeddings().register_forward_hook(self._begin)
        try:
            with torch.no_grad():
                self._check(model, blocks)
        except BaseException:
            handle.remove()
            for block in blocks.values():
                del block.forward
            raise

    def column(self, batch: PackedBatch, share: SequenceShare) -> Tensor | None:
        """Returns the experts of the tokens that this process computes of a batch, None where it has none. A token that
        sequences share has those that were recorded for the first of them."""
        experts_NLK = batch.experts_NLK
        if experts_NLK is None:
            return None
        none, layout = unrecorded(experts_NLK), share.layout
        column_M = experts_NLK.new_full((len(layout.tokens_M), *experts_NLK.shape[1:]), none)
        recorded = (experts_NLK[:, 0, 0] != none).nonzero()[:, 0]
        first_M = torch.full((len(column_M),), batch.token_count)
        first_M.scatter_reduce_(0, layout.index_N[recorded], recorded, "amin")
        known = first_M < batch.token_count
        column_M[known] = experts_NLK[first_M[known]]
        return share.of(column_M)

    @contextmanager
    def replaying(self, column_M: Tensor | None) -> Iterator[None]:
        """Sends the tokens of the passes inside the block, in turn, to these experts; None lets routers choose."""
        self._column_M, self._begun = column_M, 0
        try:
            yield
        finally:
            self._column_M = self._pass_T = None

    @contextmanager
    def recording(self) -> Iterator[list[dict[int, Tensor]]]:
        """Yields a list to which each pass inside the block adds the choices of its routers, for `recorded`."""
        self._passes = passes = list[dict[int, Tensor]]()
        try:
            yield passes
        finally:
            self._passes = None

    def recorded(self, passes: list[dict[int, Tensor]]) -> Tensor:
        """Returns the experts of the tokens of all passes, [M, L, K], on the CPU."""
        kind = experts_type(max(router.experts for router in self.routers.values()))
        width = max(router.per_token for router in self.routers.values())
        columns = []
        for layers in passes:
            tokens = len(next(iter(layers.values())))
            column_TLK = next(iter(layers.values())).new_zeros((tokens, self.layers, width), dtype=kind)
            for layer, chosen_TK in layers.items():
                column_TLK[:, layer, : chosen_TK.shape[1]] = chosen_TK.to(kind)
            columns.append(column_TLK.cpu())
        return torch.cat(columns)

    def again(self) -> AbstractContextManager[None]:
        """Returns the context in which a layer of the pass that is computed now is computed again later, when another
        pass may have begun."""
        return nullcontext() if self._pass_T is None else self._during(self._pass_T)

    @contextmanager
    def _during(self, pass_T: Tensor) -> Iterator[None]:
        before, self._pass_T = self._pass_T, pass_T
        try:
            yield
        finally:
            self._pass_T = before

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...], embeddings: Tensor) -> None:
        """Finds the experts of the tokens of a pass, whose embeddings have been computed."""
        if self._passes is not None:
            self._passes.append({})
        if self._column_M is not None:
            begun, self._begun = self._begun, self._begun + embeddings[..., 0].numel()
            self._pass_T = to_device(self._column_M[begun : self._begun], embeddings.device)

    def choose(self, layer: int, scores_TE: Tensor, found: Any) -> Any:
        """Returns what a router's `topk` of `scores_TE` returns, in place of what it has `found`."""
        if scores_TE.ndim != 2:
            return found  # a choice in groups of experts
        choice = _Router(scores_TE.shape[1], found.indices.shape[1])
        self._heard[layer] = choice
        if self.routers.get(layer) != choice:
            return found  # a choice among groups of experts
        values, chosen_TK = found
        if self._pass_T is not None:
            kept_TK = self._pass_T[:, layer, : choice.per_token]
            chosen_TK = torch.where(kept_TK == unrecorded(kept_TK), chosen_TK, kept_TK.long())
            values = scores_TE.gather(1, chosen_TK)
        if self._passes:
            self._passes[-1][layer] = chosen_TK.detach()
        return torch.return_types.topk((values, chosen_TK))

    def _check(self, model: Any, blocks: Mapping[int, Any]) -> None:
        """Finds what routers choose, sends two tokens to other experts, and looks at what arrives there."""
        two_token_pass(model)
        if self._heard.keys() != blocks.keys():
            raise ConfigurationError("chooses experts in another way than by torch.topk")
        self.routers = dict(self._heard)  # the last choice in a layer is that of experts, those before it of groups
        with self.recording() as passes:
            two_token_pass(model)
        own_TLK = self.recorded(passes)
        other_TLK = own_TLK.clone()
        for layer, router in self.routers.items():
            moved_TK = (own_TLK[:, layer, : router.per_token].long() + 1) % router.experts
            other_TLK[:, layer, : router.per_token] = moved_TK.to(own_TLK.dtype)
        with _arriving(blocks) as arrived, self.replaying(other_TLK):
            two_token_pass(model)
        for layer, router in self.routers.items():
            chosen_TK, weights_TK = arrived.get(layer, (None, None))
            if chosen_TK is None or not torch.equal(chosen_TK.cpu(), other_TLK[:, layer, : router.per_token].long()):
                raise ConfigurationError("does not let others choose the experts of its tokens")
            if weights_TK is None or not bool((weights_TK.isfinite() & (weights_TK != 0)).all()):
                raise ConfigurationError("has no weights for experts that its routers do not choose")


@frozen
class _Router:
    """`experts` that a router chooses `per_token` of."""

    experts: int
    per_token: int


class _Routed:
    """Forward pass of a part of a layer that has experts and chooses among them."""

    def __init__(self, replay: RouterReplay, layer: int, forward: Any) -> None:
        self._mode = _Replaced(replay, layer)
        self._forward = forward

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Returns what the part computes."""
        with self._mode:
            return self._forward(*positional, **named)


class _Replaced(TorchFunctionMode):
    def __init__(self, replay: RouterReplay, layer: int) -> None:
        super().__init__()
        self._replay = replay
        self._layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return self._replay.choose(self._layer, args[0], found) if func in TOPK else found


def expert_blocks(body: nn.Module) -> dict[int, Any]:
    """Returns the part of each layer that has experts, by the layer's number.

    Raises:
        ConfigurationError: there are none, or not one a layer.
    """
    names = [name for name, _ in body.named_modules() if name.rpartition(".")[2] == "experts"]
    if not names:
        raise ConfigurationError("has no routers to experts")
    parts = [name.rpartition(".")[0] for name in names]
    numbers = [[int(word) for word in part.split(".") if word.isdecimal()] for part in parts]
    if any(len(found) != 1 for found in numbers) or len({found[0] for found in numbers}) < len(parts):
        raise ConfigurationError("has several mixtures in a layer")
    return {number: body.get_submodule(part) for [number], part in zip(numbers, parts, strict=True)}


@contextmanager
def _arriving(blocks: Mapping[int, Any]) -> Iterator[dict[int, tuple[Tensor, Tensor | None]]]:
    """Yields a mapping to which a pass inside adds, for each layer, the numbers of the experts that its experts get
    [T, K], and their weights."""
    arrived: dict[int, tuple[Tensor, Tensor | None]] = {}

    def note(layer: int, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        given = [argument for argument in (*positional, *named.values()) if isinstance(argument, Tensor)]
        for numbers in (each for each in given if each.dtype == torch.int64):
            weights = (each for each in given if each.dtype.is_floating_point and each.shape == numbers.shape)
            arrived[layer] = numbers, next(weights, None)
            return

    handles = [
        block.experts.register_forward_pre_hook(
            lambda _, positional, named, layer=layer: note(layer, positional, named), with_kwargs=True
        )
        for layer, block in blocks.items()
    ]
    try:
        yield arrived
    finally:
        for handle in handles:
            handle.remove()
