"""A reward function: 1 for the right sum, and a little less for every word around it."""

END = "<|im_end|>"
"""Text with which SmolLM2 ends a reply, unless it is truncated."""


def reward_func(queries, prompts, labels):
    """One number a reply; a query is prompt + reply, special tokens included."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        words = query[len(prompt) :].removesuffix(END).rstrip(".").split()
        right = bool(words) and words[-1] == label
        rewards.append(float(right) - 0.01 * len(words))
    return rewards
