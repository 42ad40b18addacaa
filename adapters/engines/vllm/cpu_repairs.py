"""Repairs of vLLM 0.32 where it computes other numbers on a CPU than on a GPU, or leaves memory behind."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional

SHM = Path("/dev/shm")


def repair() -> None:
    """Makes vLLM's models of this process that are made from now on compute on a CPU what they do on a GPU."""
    _route_as_one_group()
    _rotate_heads_apart()
    _convolve_single_tokens()
    _unlink_joined_memory()
    _guess_ahead()
    _tell_likely_tokens_beside_given_ones()


def _route_as_one_group() -> None:
    """Lets experts be chosen where they are in no groups. The router of a CPU forgets the corrections there (ERNIE
    4.5), and knows no sigmoid (MiniMax-M2); of groups it computes both, and one group of all experts is none."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    make = CPURouter.__init__

    def made(router: Any, *arguments: Any, **settings: Any) -> None:
        make(router, *arguments, **settings)
        other = router.scoring_func == "sigmoid" or router.e_score_correction_bias is not None
        known = router.use_grouped_topk or router.custom_routing_function or router.scoring_func == "sqrtsoftplus"
        if other and not known:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    CPURouter.__init__ = made


def _rotate_heads_apart() -> None:
    """Lets queries have a dimension for their heads (LFM2, latent attention). The kernel of a CPU takes them for one
    head, whatever their number, and rotates the first tokens' alone; torch rotates all."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu

    def rotated(layer: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() > positions.dim() + 1:
            return layer.forward_native(positions, query, key)
        return rotate(layer, positions, query, key)

    RotaryEmbedding.forward_cpu = rotated


def _convolve_single_tokens() -> None:
    """Lets a prompt of one token, computed alone, begin linear attention (Qwen3-Next, Qwen3.5). The kernel wants tokens
    one after the other in memory, and ends vLLM where the only one is a part of a wider row."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    convolve = gdn_attention._causal_conv1d_fwd_cpu

    def convolved(*, x: Any, **named: Any) -> Any:
        return convolve(x=x if x.shape[1] > 1 else x[:, 0].clone()[None].transpose(0, 1), **named)

    gdn_attention._causal_conv1d_fwd_cpu = convolved


def _unlink_joined_memory() -> None:
    """Removes the names of the memory that processes of one engine share from /dev/shm, once all of them have mapped
    it. vLLM does so where a process ends by itself, which its workers never do: 4 MiB each would stay."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    join = _CPUSHMDistributed._init_cpu_shm

    def joined(group: Any) -> Any:
        handle = join(group)
        (SHM / f"{group.group_name}_{group.communicator.rank}").unlink(missing_ok=True)
        return handle

    _CPUSHMDistributed._init_cpu_shm = joined


def _guess_ahead() -> None:
    """Lets each token that is guessed ahead be drawn with the settings of its request: temperature, top-k, top-p. The
    kernel of a CPU writes them into a copy in another number format, so that tokens get what was in memory; and where
    no token was guessed, looking for the largest top-k would end vLLM."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    def repeated(output_N: Tensor, given_B: Tensor, ends_B: Tensor, replaced: int, by: int, *_: Any) -> None:
        counts_B = ends_B.diff(prepend=ends_B.new_zeros(1))
        output_N.copy_(given_B.masked_fill(given_B == replaced, by).repeat_interleave(counts_B.long()))

    among = rejection_sampler.apply_top_k_top_p

    def kept(logits_NV: Tensor, k_N: Tensor | None, p_N: Tensor | None) -> Tensor:
        return among(logits_NV, k_N, p_N) if len(logits_NV) else logits_NV

    cpu_triton_utils._expand_kernel_impl = repeated
    rejection_sampler.apply_top_k_top_p = kept


def _tell_likely_tokens_beside_given_ones() -> None:
    """Lets requests have the log-probs of their most likely tokens in a step in which others ask for those of given
    tokens, as the comparison after a push does: the sampler of a CPU leaves out the former."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.sampler import Sampler

    sample, gather = Sampler.forward, Sampler.gather_specific_token_logprobs

    def sampled(sampler: Any, logits: Tensor, sampling_metadata: Any, **settings: Any) -> Any:
        sampler.likely = sampling_metadata.max_num_logprobs
        return sample(sampler, logits, sampling_metadata, **settings)

    def gathered(sampler: Any, logprobs_BV: Tensor, given: Any, token_B: Tensor) -> Any:
        found = gather(sampler, logprobs_BV, given, token_B)
        if found is None or not sampler.likely:
            return found
        likely = sampler.gather_logprobs(logprobs_BV, sampler.likely, token_ids=token_B)
        rows, width = [*given], max(found.logprobs.shape[1], likely.logprobs.shape[1])
        parts = []
        for name, nothing in (("logprob_token_ids", 0), ("logprobs", float("-inf"))):
            both = ((getattr(each, name), each.logprobs.shape[1]) for each in (likely, found))
            joined, own = (functional.pad(part, (0, width - columns), value=nothing) for part, columns in both)
            joined[rows] = own[rows]
            parts.append(joined)
        return LogprobsTensors(*parts, found.selected_token_ranks)

    Sampler.forward, Sampler.gather_specific_token_logprobs = sampled, gathered
