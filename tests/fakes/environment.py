from rollgrad.testing.environment import *  # noqa: F403
