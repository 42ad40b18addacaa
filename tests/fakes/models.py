from rollgrad.testing.models import *  # noqa: F403
