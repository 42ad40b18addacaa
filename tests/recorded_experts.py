"""Stands for what vLLM's newer model runner does, which no CPU has: each request gets the experts of its tokens, from
vLLM's own recorder in the worker. vLLM imports the worker's class in its process."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from rollgrad.adapters.engines.vllm.profile import ProfiledWorker

RECORDING_WORKER = f"{__name__}.RecordingWorker"


class RecordingWorker(ProfiledWorker):
    """A worker that keeps the experts of all tokens of all requests, as vLLM's routers told its recorder."""

    model_runner: Any
    vllm_config: Any

    def record_experts(self) -> None:
        """Begins to record."""
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        runner, tokens = self.model_runner, self.vllm_config.scheduler_config.max_num_batched_tokens
        capturer = RoutedExpertsCapturer(tokens, self.vllm_config)
        bind_routed_experts_capturer(runner.model, capturer)
        self._rows: dict[str, dict[int, Any]] = {}
        execute = runner.execute_model

        def recorded(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            output = execute(scheduled, *arguments, **named)
            names = runner.input_batch.req_ids if scheduled.total_num_scheduled_tokens else ()
            rows_TLK, place = capturer.snapshot_routing_data(scheduled.total_num_scheduled_tokens).tolist(), 0
            for index, name in enumerate(names):
                first = int(runner.input_batch.num_computed_tokens_cpu[index])
                for offset in range(scheduled.num_scheduled_tokens[name]):
                    self._rows.setdefault(name, {})[first + offset] = rows_TLK[place]
                    place += 1
            return output

        runner.execute_model = recorded

    def experts_of_request(self, name: str) -> list[Any]:
        """Returns the experts [L, K] of the tokens of a request, in order; of all, where no prefix was shared."""
        (rows,) = (rows for own, rows in self._rows.items() if own.startswith(f"{name}-"))
        assert [*rows] == [*range(len(rows))]
        return [*rows.values()]


async def record_experts(llm: Any) -> None:
    """Has an `AsyncLLM` with the worker above say to which experts it sends tokens from now on."""
    await llm.collective_rpc("record_experts")
    generate = llm.generate

    async def recorded(prompt: Any, params: Any, name: str, **named: Any) -> AsyncIterator[Any]:
        async for output in generate(prompt, params, name, **named):
            if output.finished:
                (rows,) = await llm.collective_rpc("experts_of_request", args=(name,))
                rows = rows[params.routed_experts_prompt_start :]
                output.outputs[0].routed_experts = np.array(rows, dtype=np.uint8)
            yield output

    llm.generate = recorded
