"""A reward function: 1 for the right sum, and a little less for every word around it."""


def reward_func(queries, prompts, labels):
    """One number a reply; a query is prompt + reply."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        words = query[len(prompt) :].rstrip(".").split()
        right = bool(words) and words[-1] == label
        rewards.append(float(right) - 0.01 * len(words))
    return rewards
