from rollgrad.testing.checkpoint_store import *  # noqa: F403
