from rollgrad.testing.metric_sink import *  # noqa: F403
