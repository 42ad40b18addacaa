"""HTTP servers: agents behind the wires of OpenAI and Anthropic, and reward models."""
