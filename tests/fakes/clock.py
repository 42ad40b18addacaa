from rollgrad.testing.clock import *  # noqa: F403
