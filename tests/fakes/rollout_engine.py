from rollgrad.testing.rollout_engine import *  # noqa: F403
