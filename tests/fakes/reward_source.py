from rollgrad.testing.reward_source import *  # noqa: F403
