from rollgrad.testing.chat_codec import *  # noqa: F403
