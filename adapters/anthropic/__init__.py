"""The wire of Anthropic's messages."""
