"""Which causal language models of the installed transformers train and generate exactly, and which are refused.

A tiny model with random weights of every type is saved, loaded as a run loads it and compared with transformers' own
forward pass over one sequence at a time, without cache or packing: log-probs, entropies and all gradients of a
batch (several lengths, shared prompts, turns with gaps), and the log-probs that the embedded engine reports (shared
prefills, long replies, replies continued on kept keys). Whatever is not exact must be refused in one sentence.

`scripts/model_table.py` examines all types and writes the list in docs/models.md.
"""

import asyncio
import math
import re
import tempfile
import textwrap
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.adapters.engines.embedded.decoding import check_decoding
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.loading.compatibility import usable_positions
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.optimizers.untrained_parameters import may_lack_gradient
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.trajectory import TrajectoryBuilder
from rollgrad.domain.errors import CheckpointError, ConfigurationError
from tests.tiny_architectures import tiny_model

FLAG = "--actor.model_name_or_path"
TEMPERATURE = 0.7
LOGPROB_TOLERANCE = 1e-4
"""Nats; float32 keeps logits of 10 to 1e-6."""
GRADIENT_TOLERANCE = 3e-4
"""Largest difference of a gradient, as a share of the largest gradient."""
LONGEST = 60
"""Tokens of the longest sequence; windows are 12 tokens wide."""
PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
EVERY_TYPE = "## Every type\n"
"""Heading of the list, which is the end of its section; it is made with the version in constraints.txt."""
NEWEST = "### With transformers 5.24\n"
"""Heading of the list of types whose outcome is another with the newest version that is allowed."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama, llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama, yarn rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama, dynamic rope": (
        "llama",
        {
            "max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 24,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [9.0] * 4,
                "original_max_position_embeddings": 24,
            },
        },
    ),
    "phimoe, no window": ("phimoe", {"sliding_window": None}),
    "qwen2_moe, no window": ("qwen2_moe", {"use_sliding_window": False}),
    "cohere, scaled logits": ("cohere", {"logit_scale": 0.0625}),
    "granite, scaled": (
        "granite",
        {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ),
    "granitemoe, scaled logits": ("granitemoe", {"logits_scaling": 6.0}),
    "gemma3_text, capped logits": ("gemma3_text", {"final_logit_softcapping": 3.0}),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma4_text, capped logits": ("gemma4_text", {"final_logit_softcapping": 3.0}),
    "deepseek_v3, equal widths": ("deepseek_v3", {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}),
    "llama4_text, no chunks": ("llama4_text", {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]}),
    "qwen3_next, full layers": ("qwen3_next", {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}),
    "inkling_text, padded vocabulary": ("inkling_text", {"unpadded_vocab_size": 90}),
    "gpt2, scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
}
"""Settings of real checkpoints that change what a type computes."""


@frozen(kw_only=True)
class Finding:
    """Findings about one type of model. Gaps are the largest: of log-probs and entropies in nats, of gradients as a
    share of the largest."""

    name: str
    training: float = math.nan
    gradient: float = math.nan
    engine: float = math.nan
    padded: bool = False
    """Whether it is computed with padding, and sampled from without a cache."""
    refusal: str = ""
    """Why it is not trained; empty if it is."""
    idle: bool = False
    """Whether weights get no gradient, so that a run that trains all of them is refused in its first step."""
    engine_refusal: str = ""
    """Why the embedded engine does not sample from it."""
    unbuilt: str = ""
    """Why transformers makes no tiny model of it."""
    fault: str = ""
    """A traceback, or a sentence that breaks the rules of sentences."""

    @property
    def outcome(self) -> str:
        """Its outcome, as the documents tell it."""
        if self.unbuilt:
            return f"not examined ({self.unbuilt})"
        if self.refusal:
            return f"refused ({_reason(self.refusal)})"
        exact = "exact, padded and recomputed" if self.padded else "exact"
        if self.idle:
            exact += ", trained in parts alone, as its attention to an encoder gets no gradient"
        return f"{exact}; no embedded engine ({_reason(self.engine_refusal)})" if self.engine_refusal else exact

    @property
    def wrong(self) -> str:
        """Returns the faults that were found; none where all is well."""
        if self.fault:
            return self.fault
        bad = []
        if not self.refusal and not self.training < LOGPROB_TOLERANCE:
            bad.append(f"log-probs off by {self.training:.2g}")
        if not self.refusal and not self.gradient < GRADIENT_TOLERANCE:
            bad.append(f"gradients off by {self.gradient:.2g}")
        if not self.refusal and not self.engine_refusal and not self.engine < LOGPROB_TOLERANCE:
            bad.append(f"engine off by {self.engine:.2g}")
        return ", ".join(bad)


def _reason(sentence: str) -> str:
    """The part of a refusal that is neither the model's place nor what to do."""
    _, _, reason = sentence.partition(" (" if " (" in sentence else "Hugging Face model: ")
    reason = reason.rpartition("): ")[0] or reason.rstrip(".")
    return re.sub(r" by \S+ of their spread.*|\. Bring a whole copy there.*", "", reason)


def types() -> list[str]:
    """Every type that `AutoModelForCausalLM` knows, and the variants."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]


def documented(heading: str) -> dict[str, str]:
    """The outcome of each type in the list of a section of the documents."""
    outcomes: dict[str, str] = {}
    for item in _section(heading)[1].split("\n* ")[1:]:
        outcome, _, names = " ".join(item.split()).partition(": `")
        outcomes |= dict.fromkeys(names.rstrip("`").split("`, `"), outcome)
    return outcomes


def document(heading: str, outcomes: Mapping[str, str]) -> None:
    """Writes that list: the types of each outcome, the most frequent first."""
    before, section, after = _section(heading)
    text = section.partition("\n* ")[0]
    for outcome, _ in Counter(outcomes.values()).most_common():
        names = ", ".join(f"`{name}`" for name in sorted(outcomes) if outcomes[name] == outcome)
        text += "\n" + textwrap.fill(f"* {outcome}: {names}", 120, subsequent_indent="  ", break_on_hyphens=False)
    PAGE.write_text(before + text + "\n" + after, encoding="utf-8")


def _section(heading: str) -> tuple[str, str, str]:
    """The page before the section, the section, and what follows it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(heading)
    section, following, after = rest.partition("\n#")
    return before + heading, section, following + after


def examine(name: str) -> Finding:
    """Compares one type or variant."""
    model_type, changes = VARIANTS.get(name, (name, {}))
    with tempfile.TemporaryDirectory() as directory:
        unbuilt = ""
        try:
            tiny_model(model_type, **changes).save_pretrained(directory)
        except Exception as error:  # its files without weights must be refused all the same
            unbuilt = next(line for line in f"{error}".splitlines() if line).rstrip(" :.")
            Path(directory, "config.json").write_text(f'{{"model_type": "{model_type}"}}', encoding="utf-8")
        try:
            model = load_causal_lm(directory, dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
        except (ConfigurationError, CheckpointError) as error:
            return Finding(name=name, unbuilt=unbuilt, **_sentence(error, "refusal"))
        except Exception as error:
            return Finding(name=name, fault=_last_lines(error))
        try:
            return _compare(name, directory, model)
        except Exception as error:
            return Finding(name=name, fault=_last_lines(error))


def _sentence(error: Exception, kind: str) -> dict[str, str]:
    text = str(error)
    if "\n" in text or FLAG not in text or not text.endswith("."):
        return {"fault": f"not a sentence with a flag: {text!r}"}
    return {kind: text}


def _last_lines(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:200]} ({Path(place.filename).name}:{place.lineno})"


def _compare(name: str, directory: str, model: Any) -> Finding:
    """Within the positions that the model has: beyond them, packs of sequences must be refused."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    limit = usable_positions(model.config) or LONGEST
    if limit < LONGEST:
        try:
            PackedLM(model)(episodes(LONGEST))
        except ConfigurationError as error:
            if not str(error).endswith(f"--data.max_len {limit}."):
                raise
        else:
            return Finding(name=name, fault=f"packs of sequences beyond {limit} tokens are computed")
    batch = episodes(min(limit, 42))
    training, gradient = packed_gaps(plain, model, batch)
    idle = any(p.requires_grad and p.grad is None and not may_lack_gradient(n) for n, p in model.named_parameters())
    plain.requires_grad_(False)
    try:
        check_decoding(model.requires_grad_(False), FLAG)
    except ConfigurationError as error:
        return Finding(
            name=name,
            training=training,
            gradient=gradient,
            padded=is_padded(model),
            idle=idle,
            **_sentence(error, "engine_refusal"),
        )
    engine = EmbeddedEngine(model, eos_token_ids=(), max_batch_size=16)
    gap = asyncio.run(engine_gap(plain, engine, min(limit, LONGEST)))
    return Finding(name=name, training=training, gradient=gradient, engine=gap, padded=is_padded(model), idle=idle)


def episodes(longest: int) -> PackedBatch:
    """Six samples of three prompts in one pack, none longer than `longest`: 3, 2 and 1 of a prompt, two turns each."""
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 80, (count,), generator=draw).tolist()

    prompts = [tokens(min(length, longest // 3)) for length in (17, 5, 9)]
    made = []
    for sample, group in enumerate((0, 0, 0, 1, 1, 2)):
        builder = TrajectoryBuilder(prompts[group], group_id=group, sample_id=sample)
        left = longest - len(prompts[group]) - sample
        for turn, count in enumerate((left // 2, left // 4)):
            if turn:
                builder.add_observation(tokens(max(1, left // 8)))
            sampled = tokens(max(1, count))
            builder.add_action(
                Generation(
                    token_ids=sampled,
                    logprobs=[-1.0] * len(sampled),
                    versions=[0] * len(sampled),
                    stop_reason=StopReason.STOP,
                )
            )
        made.append(builder.build(stop_reason=StopReason.STOP))
    return pack(made)


def logprobs(plain: Any, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """log p(token | those before it) of every token but the first, [T - 1, V], by transformers' own forward pass."""
    logits = plain(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1].float()
    return (logits / temperature).log_softmax(-1)


def packed_gaps(plain: Any, model: Any, batch: PackedBatch) -> tuple[float, float]:
    """(largest gap of log-probs and entropies, largest gap of a gradient) of `model` on the packed batch."""
    found_A, entropy_A = PackedLM(model, temperature=TEMPERATURE)(batch)
    expected, entropies = [], []
    for start, length in zip(batch.starts_S.tolist(), batch.lengths_S.tolist(), strict=True):
        tokens = batch.tokens_N[start : start + length]
        table_TV = logprobs(plain, tokens.tolist(), TEMPERATURE)
        acts = batch.action_mask_N[start + 1 : start + length]
        expected.append(table_TV.gather(1, tokens[1:, None])[:, 0][acts])
        entropies.append(-(table_TV.exp() * table_TV).sum(-1)[acts])
    expected_A, expected_entropy_A = torch.cat(expected), torch.cat(entropies)
    weights_A = torch.linspace(-1, 1, len(found_A))
    (weights_A * (found_A + 0.3 * entropy_A)).sum().backward()
    (weights_A * (expected_A + 0.3 * expected_entropy_A)).sum().backward()
    value_gap = max(_largest(found_A - expected_A), _largest(entropy_A - expected_entropy_A))
    theirs, mine = dict(plain.named_parameters()), dict(model.named_parameters())
    zero = torch.zeros(())
    pairs = [
        (zero if mine[n].grad is None else mine[n].grad, zero if p.grad is None else p.grad) for n, p in theirs.items()
    ]
    scale = max(_largest(p) for _, p in pairs)
    return value_gap, max(_largest(m - p) for m, p in pairs) / scale


def _largest(tensor: Any) -> float:
    value = float(tensor.detach().abs().max())
    return math.inf if math.isnan(value) else value


async def engine_gap(plain: Any, engine: EmbeddedEngine, longest: int) -> float:
    """The largest gap of the log-probs that the engine reports: five prompts, some the same or with the same
    beginning, a long reply to each, then as many new tokens and another reply on the kept keys."""
    draw = torch.Generator().manual_seed(2)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 80, (count,), generator=draw).tolist())

    unit = longest // 6
    opening = tokens(unit)
    prompts = [opening + tokens(unit // 2), opening + tokens(3), opening + tokens(3), tokens(5)]
    prompts.append(prompts[0])

    async def reply(prompt: tuple[int, ...], count: int, seed: int) -> tuple[tuple[int, ...], float]:
        params = SamplingParams(max_new_tokens=count, seed=seed)
        made = await engine.generate(GenerationRequest(prompt_token_ids=prompt, params=params, keep=True))
        whole = (*prompt, *made.token_ids)
        table_TV = logprobs(plain, whole)[len(prompt) - 1 :]
        expected = table_TV.gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
        return whole, _largest(torch.tensor(made.logprobs) - expected)

    with torch.no_grad():
        first = await asyncio.gather(*(reply(p, 2 * unit - i, i) for i, p in enumerate(prompts)))
        extended = [whole + tokens(unit // 2 + i % 2) for i, (whole, _) in enumerate(first)]
        again = await asyncio.gather(*(reply(p, unit, 9 + i) for i, p in enumerate(extended)))
    return max(gap for _, gap in [*first, *again])
