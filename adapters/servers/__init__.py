"""HTTP servers: agents with the APIs of OpenAI and Anthropic, reward models, the Tinker API, the page of runs."""
