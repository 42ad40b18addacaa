"""Sums as a taskset of verifiers, from 0.4 on, and the harness that plays them: it asks once."""

import json
import re
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI

FILE = Path(__file__).parents[1] / "data" / "sums_train.jsonl"


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        numbers = re.findall(r"\d+", trace.last_reply)
        return float(numbers[-1:] == [self.data.answer])


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for line in FILE.read_text().splitlines():
            row = json.loads(line)
            yield SumTask(SumData(prompt=row["input"], answer=row["label"]), self.config.task)


class Asks(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": data.prompt}])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Asks", "Sums"]
