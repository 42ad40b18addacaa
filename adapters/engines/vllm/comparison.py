"""Comparison of a vLLM that has taken weights with the trainer.

vLLM computes prompts at once and replies token by token. The kernels of the two differ, and may read different tensors:
for latent attention, matrices that vLLM takes out of the weights when these are loaded; in CUDA graphs, the memory that
was there when they were captured. The trainer's log-probs tell that prompts are right, and those of prompts that
replies are.
"""

import asyncio
from collections.abc import Callable, Sequence

from rollgrad.adapters.engines.vllm.core import Core
from rollgrad.adapters.weights.receiver_port import Probe
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams

STEPS = 4
"""Tokens of the reply that is compared; prompt and reply are as long as the trainer's tokens."""


async def difference(core: Core, probe: Probe, name: Callable[[], str]) -> str | None:
    """Returns how a vLLM differs from the trainer, or its replies from its prompts; None if rounding explains it.
    `name` returns a new name for each request.

    Raises:
        EngineError: vLLM failed.
    """
    actual = await _logprobs(core, probe.tokens, 1, probe.temperature, name)
    return probe.difference(actual, core.model) or await _difference_of_steps(core, probe, name)


async def _difference_of_steps(core: Core, probe: Probe, name: Callable[[], str]) -> str | None:
    """Returns how log-probs of a reply differ from those of the same tokens in prompts."""
    prompt = tuple(probe.tokens[: max(1, len(probe.tokens) - STEPS)])
    params = SamplingParams(max_new_tokens=STEPS, temperature=probe.temperature)
    request = GenerationRequest(prompt_token_ids=prompt, params=params)
    reply = await core.sample(name(), request, frozenset(), None)
    # The first token comes from the prompt's own pass.
    expected = await _logprobs(core, [*prompt, *reply.token_ids], len(prompt) + 1, probe.temperature, name)
    gaps = [abs(found - known) for found, known in zip(reply.logprobs[1:], expected, strict=True)]
    mean, tolerance = sum(gaps) / max(1, len(gaps)), core.model.tolerance(core.model.dtype)
    if mean <= tolerance:
        return None
    return (
        f"After a transfer of weights, vLLM's log-probs of {len(gaps)} tokens that it sampled one after the other "
        f"differ from those that it computes of them at once by {mean:.2g} nats on average, more than the "
        f"{tolerance:g} that rounding explains: it samples with other weights than it was given, or its CUDA graphs "
        "compute something else; --vllm.extra.enforce_eager true samples without them."
    )


async def _logprobs(
    core: Core, tokens: Sequence[int], first: int, temperature: float, name: Callable[[], str]
) -> list[float]:
    """Returns the log-probs of `tokens[first:]`, each given the tokens before it as a prompt."""
    asked = [
        core.next_logprob(name(), tokens[:length], tokens[length], temperature) for length in range(first, len(tokens))
    ]
    return list(await asyncio.gather(*asked))
