"""Translates what `trl distillation` has of its own: a teacher that the policy is compared with on its own replies."""

from rollgrad.entrypoints.translation.draft import Draft
from rollgrad.entrypoints.trl.rollouts import set_engines, set_prompts


def finish_distillation(draft: Draft, *, dataset: str | None, samples: int) -> None:
    """Sets `data`, `rollout` and `algo`; one reply to each of the `samples` prompts of an optimizer step.

    Raises:
        ConfigurationError: processes cannot share engines as they say.
    """
    set_prompts(draft, dataset)
    set_engines(draft)
    draft.set("rollout.batch_size", samples)
    draft.set("rollout.n_samples_per_prompt", 1)
    draft.set("algo.advantage.estimator", "on_policy_distill")
    draft.set("algo.kl.init_coef", 1.0)
    draft.set("algo.kl.use_loss", True)
    draft.set("algo.kl.estimator", "full")
    draft.set("actor.loss_aggregation", "token_mean")
    for name in ("eval_strategy", "eval_steps", "dataset_test_split"):
        draft.lose(name, "held-out replies are judged by a reward: set eval.dataset and reward.verifier, say")
