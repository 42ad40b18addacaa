from rollgrad.testing.agent_executor import *  # noqa: F403
