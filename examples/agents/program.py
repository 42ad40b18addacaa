"""An agent that is a program: it reads its task from standard input and prints its answer.

rollgrad train rl --config examples/sums.yaml --agent.command "python examples/agents/program.py"
"""

import json
import os
import sys

from openai import OpenAI

task = json.loads(sys.stdin.readline())
reply = OpenAI().chat.completions.create(model=os.environ["ROLLGRAD_MODEL"], messages=task["messages"])
print(reply.choices[0].message.content)
