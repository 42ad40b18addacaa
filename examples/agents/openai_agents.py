"""An agent of the OpenAI Agents SDK."""

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def run_agent(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        agent = Agent(name="adder", model=OpenAIChatCompletionsModel(model=task.model, openai_client=client))
        result = await Runner.run(agent, task.prompt.messages[-1]["content"])
        return result.final_output
