"""vLLM's sampling parameters of a request."""

from typing import Any

from rollgrad.domain.episodes.generation import GenerationRequest

SEEDS = 2**63
"""vLLM's seeds are 63 bits."""

ALL = -1
"""vLLM's number of log-probs that are those of all tokens."""

BEGUN_STRIDE = 2**31
"""Distance between the seeds of one reply's parts: vLLM cannot continue the random numbers of another request."""


def plain_parameters(request: GenerationRequest, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """Returns the fields that vLLM's `SamplingParams` and the bodies of its server have in common."""
    params = request.params
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_tokens": params.max_new_tokens,
        "min_tokens": min(params.min_new_tokens, params.max_new_tokens),  # vLLM takes no more
        "ignore_eos": True,  # ends are the ids named here and no others
        "stop_token_ids": sorted(eos_token_ids.union(params.stop_token_ids)),
        "stop": list(params.stop_strings),
        "skip_special_tokens": False,
        "seed": (params.seed + request.begun * BEGUN_STRIDE) % SEEDS,
    }


def parameters(request: GenerationRequest, eos_token_ids: frozenset[int], vocabulary: int, *, streamed: bool) -> Any:
    """Returns vLLM's `SamplingParams`.

    Args:
        request: what is asked for.
        eos_token_ids: tokens that end a reply.
        vocabulary: number of the model's tokens, beyond which vLLM looks for none.
        streamed: whether outputs are parts of a reply as they come, not whole replies.
    """
    from vllm import SamplingParams as Params
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    grammar = request.params.grammar
    return Params(
        **plain_parameters(request, eos_token_ids),
        detokenize=bool(request.params.stop_strings),
        logprobs=min(request.params.top_logprobs, vocabulary),
        structured_outputs=None if grammar is None else StructuredOutputsParams(grammar=grammar),
        flat_logprobs=True,
        routed_experts_prompt_start=request.known_experts,
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
