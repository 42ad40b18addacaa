from rollgrad.testing.weight_channel import *  # noqa: F403
