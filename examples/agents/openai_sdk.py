"""An agent on OpenAI's SDK. It knows nothing of training: only its base URL and key say where replies come from."""

from openai import AsyncOpenAI


async def run_agent(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        reply = await client.chat.completions.create(model=task.model, messages=list(task.prompt.messages))
        return reply.choices[0].message.content
