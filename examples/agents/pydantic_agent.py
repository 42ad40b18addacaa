"""An agent of Pydantic AI."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def run_agent(task):
    provider = OpenAIProvider(base_url=task.base_url, api_key=task.api_key)
    agent = Agent(OpenAIChatModel(task.model, provider=provider))
    result = await agent.run(task.prompt.messages[-1]["content"])
    return result.output
