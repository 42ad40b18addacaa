from rollgrad.testing.prompt_source import *  # noqa: F403
