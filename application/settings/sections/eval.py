"""The section `eval`: evaluation on held-out prompts."""

from attrs import define

from rollgrad.domain.settings import COUNT, NOT_NEGATIVE, PERIOD, SOME_SHARE, Condition, setting
from rollgrad.domain.splits import SPLIT, SPLIT_HELP

SAMPLED = Condition(
    lambda here, run: here.temperature > 0, "{at}temperature is 0, which is greedy", "set --{at}temperature above 0"
)


@define(kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts, before, during and after training."""

    dataset: str | None = setting(
        None, "Held-out prompts, in the same forms as data.prompt_dataset; none turns evaluation off."
    )
    split: str = setting("test", SPLIT_HELP, SPLIT)
    steps: int = setting(-1, "Steps between evaluations; -1 evaluates only at the start and the end.", PERIOD)
    temperature: float = setting(0.0, "Sampling temperature; 0 is greedy.", NOT_NEGATIVE)
    top_p: float = setting(1.0, "Nucleus mass; 1 is the full distribution.", SOME_SHARE, only_if=SAMPLED)
    top_k: int = setting(0, "Most likely tokens kept; 0 keeps all.", NOT_NEGATIVE, only_if=SAMPLED)
    n_samples_per_prompt: int = setting(1, "Samples of each prompt, for pass@k, best@k, mean@n and maj@n.", COUNT)
    max_new_tokens: int | None = setting(None, "Sampled tokens per episode; default: rollout.max_new_tokens.", COUNT)
    max_samples: int | None = setting(
        None, "Evaluate at most this many prompts, of several datasets about as many of each.", COUNT
    )
