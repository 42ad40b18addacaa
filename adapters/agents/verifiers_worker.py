"""Plays episodes of a verifiers environment: a program for the Python in which that package is installed.

Protocol: lines of JSON. The program's argument is the environment's id. The environment's own arguments are the first
line of its input: they may hold keys, and every user of the machine can read a command line. The program prints
{"ready": true} or {"refused": sentence}, and then answers requests, many at once, until its input ends:

- {"id", "rows"} asks for the next rows, where `rows` is train or eval. The answer is {"id", "rows"}, with none at the
  end.
- {"id", "row", "base_url", "api_key", "unlearned_key", "model"} plays an episode. The answer is
  {"id", "reward", "metrics"}, or {"id", "rewards", "metrics"} where several agents learn.
- Either may be answered with {"id", "error"}.
- {"cancel": id} ends an episode.

Imports nothing of rollgrad, whose pinned packages are others.
"""

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, TextIO

PAGE = 100
"""Rows in an answer."""
END_SECONDS = 120.0
"""Seconds that episodes and environment have to end after the requests. Those in a cloud delete their sandboxes then,
which cost money while they are there, and verifiers gives 60 to a Compose project. A run that was killed kills nothing.
"""
LONGEST = 1000
"""Characters of an environment's error, which may repeat a whole conversation."""
OLDEST = "0.1.14"
"""The oldest verifiers whose environments can be asked what is asked here."""

EPISODE, UNLEARNED = "ROLLGRAD_EPISODE_", "_UNLEARNED"
"""Beginning of the names of variables with keys of episodes, and the end of those of replies that nothing is learned
from."""


class Refused(Exception):  # noqa: N818 (as it reads)
    """The environment cannot be trained on; the message is a sentence."""


class LoadedEnvironment:
    """An environment of `load_environment(**env_args)`, as those for verifiers 0.1 to 0.3 have it."""

    def __init__(self, verifiers: Any, env_id: str, env_args: Mapping[str, Any]) -> None:
        self._verifiers = verifiers
        self._env = verifiers.load_environment(env_id, **env_args)
        if not hasattr(self._env, "requires_group_rollouts"):
            version = getattr(verifiers, "__version__", "of this Python")
            raise Refused(f"verifiers {version} is too old: install verifiers>={OLDEST},<0.4 beside {env_id}.")
        if self._env.requires_group_rollouts:
            raise Refused(
                f"The rubric of {env_id} scores the rollouts of a prompt together, but here each is scored by itself: "
                "leave its group rewards out."
            )

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yields the rows of `train` or `eval` as the environment takes them."""
        if split == "train":
            yield from map(dict, self._env.get_dataset())
            return
        self._env.build_eval_dataset()
        if self._env.eval_dataset is None:
            raise Refused("The environment has no rows for evaluation: hold some of the rows for training out.")
        yield from map(dict, self._env.get_eval_dataset())

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Holds what episodes share."""
        try:
            yield
        finally:
            await self._env._teardown()

    async def play(
        self, row: dict[str, Any], *, base_url: str, api_key: str, unlearned_key: str, model: str
    ) -> dict[str, Any]:
        """Plays an episode, and returns what the rubric says of it."""
        from openai import AsyncOpenAI

        client = self._verifiers.OpenAIChatCompletionsClient(
            AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None)
        )
        try:
            output = await self._env.run_rollout(row, client, model, {})
        finally:
            await client.close()
        if output.get("error"):
            error = output["error"]
            raise RuntimeError(error.get("error_chain_repr", error) if isinstance(error, Mapping) else error)
        return scored(output["reward"], output.get("metrics") or {})


class TaskEnvironment:
    """A taskset with the agents that play it, which is all there is from 0.4 on. `env_args` are its `[env]` block.

    Several agents that are trainable are roles: each asks with a key of its own. Those that are not (a simulated user)
    ask with the key of replies that nothing is learned from, unless they have a client of their own.
    """

    def __init__(self, verifiers: Any, env_id: str, env_args: Mapping[str, Any]) -> None:
        self._verifiers = verifiers
        taskset = {**env_args.get("taskset", {}), "id": env_id}
        self._env = verifiers.load_environment(verifiers.resolve_env_config({**env_args, "taskset": taskset}))
        self._task = type(self._env.taskset).task_type()
        self._names = [name for name, part in self._env.config if isinstance(part, verifiers.AgentConfig)]
        self._set_up, self._env.setup = self._env.setup, self._setup
        self._learning: list[str] = []
        self._episodes = 0

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yields the data of all tasks."""
        if split != "train":
            raise Refused("A taskset has one set of rows: name those for evaluation by its own settings in env_args.")
        if not self._env.taskset.bounded:
            raise Refused("The taskset has no end: bound it by its own settings in env_args.")
        for task in self._env.taskset:
            yield task.data.model_dump(mode="json")

    def serving(self) -> Any:
        """Holds what episodes share."""
        return self._env.serving()

    async def _setup(self, agents: Any) -> None:
        """Gives the agents of an episode their keys, once the environment has said which are trainable."""
        await self._set_up(agents)
        players = {name: getattr(agents, name) for name in self._names}
        learning = [name for name, player in players.items() if player.trainable]
        self._learning = learning  # the same in all episodes
        for name, player in players.items():
            context, client = player.ctx, player.ctx.client
            if not client.api_key_var.startswith(EPISODE) or learning == [name]:
                continue  # it has a client of its own, or learns alone
            key = f"{client.api_key_var}_{name}" if name in learning else f"{client.api_key_var}{UNLEARNED}"
            told = client.model_copy(update={"api_key_var": key})
            player.ctx = self._verifiers.ModelContext(model=context.model, client=told, sampling=context.sampling)

    async def play(
        self, row: dict[str, Any], *, base_url: str, api_key: str, unlearned_key: str, model: str
    ) -> dict[str, Any]:
        """Plays an episode, and returns what the task's rewards and metrics say of it."""
        self._episodes += 1
        # Its clients take a key by the name of a variable only; runtimes hide those with API_KEY in it from programs.
        key = f"{EPISODE}{self._episodes}_API_KEY"
        keys = {key: api_key, f"{key}{UNLEARNED}": unlearned_key}
        keys |= {f"{key}_{name}": f"{api_key}:{name}" for name in self._names}
        os.environ.update(keys)
        try:
            client = self._verifiers.EvalClientConfig(base_url=base_url, api_key_var=key)
            task = self._task(self._task.data_type().model_validate(row), self._env.config.taskset.task)
            (slot,) = self._env.slots(task)
            context = self._verifiers.ModelContext(model=model, client=client)
            episode = await self._env.run_slot(slot, context)
        finally:
            for name in keys:
                del os.environ[name]
        return self._judged(episode)

    def _judged(self, episode: Any) -> dict[str, Any]:
        """Returns the rewards and metrics of an episode that has been played, by agent if several learn.

        Raises:
            RuntimeError: the episode failed, nobody learns from it, or an agent that does has played twice.
        """
        errors = [error for part in (episode, *episode.traces) for error in part.errors]
        if not episode.ok:
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed")
        learning = [trace for trace in episode.traces if trace.agent.trainable]
        names = [trace.agent.name for trace in learning]
        if len(set(names)) != len(names) or not names:
            raise RuntimeError(
                f"the agents {', '.join(names) or '(none)'} learn from the episode, but each that does plays once in it"
            )
        judged = {}
        for name, trace in zip(names, learning, strict=True):
            parts = {**trace.rewards, **trace.metrics}
            judged[name] = scored(trace.reward, {key: getattr(part, "value", part) for key, part in parts.items()})
        if len(self._learning) < 2:
            return judged[names[0]]
        return {
            "rewards": {name: own["reward"] for name, own in judged.items()},
            "metrics": {
                f"{name}_{key}": value for name, own in judged.items() for key, value in own["metrics"].items()
            },
        }


def scored(reward: Any, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer with plain numbers, without the metrics that have none."""
    return {
        "reward": float(reward),
        "metrics": {name: float(value) for name, value in metrics.items() if value is not None},
    }


Loaded = LoadedEnvironment | TaskEnvironment


def load(env_id: str, env_args: Mapping[str, Any]) -> Loaded:
    """Returns the environment of the installed version.

    Raises:
        Refused: the package is not there, too old, or has no such environment.
    """
    try:
        package = importlib.import_module("verifiers")
        if not _has_loader(env_id):
            return TaskEnvironment(importlib.import_module("verifiers.v1"), env_id, env_args)
        if not hasattr(package, "load_environment"):
            raise Refused(
                f"{env_id} has a load_environment, which verifiers {package.__version__} no longer knows: install "
                "verifiers<0.4 beside it."
            )
        return LoadedEnvironment(package, env_id, env_args)
    except Refused:
        raise
    except ModuleNotFoundError as error:
        if error.name != "verifiers":
            raise Refused(f"The environment {env_id} cannot be loaded: {error}.") from error
        raise Refused(f"{sys.executable} has no package verifiers: install it there, with the environment.") from error
    except Exception as error:
        words = f"{type(error).__name__}: {error}"[:LONGEST]
        raise Refused(f"The environment {env_id} cannot be loaded: {words}") from error


def _has_loader(env_id: str) -> bool:
    """Returns whether the environment's module has the function of environments before verifiers 0.4."""
    module = env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    try:
        return hasattr(importlib.import_module(module), "load_environment")
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return False  # the built-in tasksets are in the package


class Service:
    """Answers requests about an environment."""

    def __init__(self, environment: Loaded, answers: TextIO) -> None:
        self._environment = environment
        self._answers = answers
        self._rows: dict[str, Iterator[dict[str, Any]]] = {}
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def run(self, requests: TextIO) -> None:
        """Answers until `requests` ends; then cancels what is not answered."""
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[str | None] = asyncio.Queue()

        def read() -> None:
            for line in requests:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, None)
            time.sleep(END_SECONDS)  # what blocks, or takes no cancellation, would outlive the run
            with contextlib.suppress(ProcessLookupError):  # no group of its own
                os.killpg(os.getpid(), signal.SIGKILL)

        async with self._environment.serving():
            write(self._answers, {"ready": True})
            threading.Thread(target=read, daemon=True).start()
            while (line := await lines.get()) is not None:
                request = json.loads(line)
                if "cancel" not in request:
                    number = request.pop("id")
                    self._playing[number] = asyncio.create_task(self._answer(number, request))
                elif request["cancel"] in self._playing:
                    self._playing[request["cancel"]].cancel()
            for task in self._playing.values():
                task.cancel()
            await asyncio.gather(*self._playing.values(), return_exceptions=True)

    async def _answer(self, number: int, request: dict[str, Any]) -> None:
        said: dict[str, Any]
        try:
            if "rows" in request:
                said = {"rows": self._next_rows(request["rows"])}
            else:
                said = await self._environment.play(json.loads(request.pop("row")), **request)
        except Refused as error:
            said = {"error": str(error)}
        except Exception as error:
            said = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]}
        finally:
            del self._playing[number]
        write(self._answers, {"id": number, **said})

    def _next_rows(self, split: str) -> list[dict[str, Any]]:
        # Taken out: after the last, or an error, the next request is for the first again.
        rows = self._rows.pop(split, None) or self._environment.rows(split)
        page = [
            {"row": json.dumps(row), "prompt": row.get("prompt"), "answer": row.get("answer")}
            for row in itertools.islice(rows, PAGE)
        ]
        if page:
            self._rows[split] = rows
        return page


def write(answers: TextIO, value: Mapping[str, Any]) -> None:
    """Writes a line of JSON."""
    print(json.dumps(value), file=answers, flush=True)


def main() -> None:
    """Loads the environment and answers."""
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the environment prints is no answer
    (env_id,) = sys.argv[1:]
    env_args = json.loads(requests.readline())
    try:
        environment = load(env_id, env_args)
    except Refused as error:
        write(answers, {"refused": str(error)})
    else:
        asyncio.run(Service(environment, answers).run(requests))


if __name__ == "__main__":
    main()
