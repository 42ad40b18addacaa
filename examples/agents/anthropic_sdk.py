"""An agent on Anthropic's SDK, which streams."""

from anthropic import AsyncAnthropic


async def run_agent(task):
    async with AsyncAnthropic(base_url=task.root_url, api_key=task.api_key) as client:
        stream = client.messages.stream(model=task.model, max_tokens=64, messages=list(task.prompt.messages))
        async with stream as events:
            return await events.get_final_text()
