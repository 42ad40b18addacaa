"""Memory of each process while a model is loaded at ZeRO stage 3, or for FSDP2. Beside it stand the process's share of
the weights and the largest layer, which it needs at once, and the whole model, which it would hold if it read all
before it divided.

Llama-70B's widths, few layers and a small vocabulary; weights are noise in files made here. Peaks are of the process's
own memory, above what it held before it loaded; pages of the files, which all processes share and the system drops when
it needs room, are not counted. Processes are on this machine's CPU, so that this is all there is.

    python benchmarks/load_memory.py [--strategy fsdp2]
"""

import json
import multiprocessing
import sys
import tempfile
import threading
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from attrs import define, evolve, frozen
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.results import keep

BLOCK_BYTES = 64 * 2**20
"""Bytes of noise that the files repeat."""
FILES = 2
SECONDS = 600.0
INTERVAL = 0.002
"""Seconds between two looks at the memory."""


@define(kw_only=True)
class Work:
    """Settings of the measurement; the model's sizes are those of Llama-70B by default."""

    hidden: int = 8192
    """Numbers of a hidden state."""
    feed_forward: int = 28672
    """Inner features of a layer."""
    heads: int = 64
    """Query heads; there are eight key/value heads."""
    layers: int = 2
    """Layers."""
    vocabulary: int = 4096
    """Tokens."""
    processes: int = 2
    """Processes that divide the model."""
    strategy: Literal["deepspeed", "fsdp2"] = "deepspeed"
    """How they divide it."""
    smoke: bool = False
    """Smallest work, to see that the script runs; its figures mean nothing."""


SMALL = Work(hidden=256, feed_forward=512, heads=8, vocabulary=512, processes=1)
"""Sizes of the smallest work."""


@frozen
class Sizes:
    """Bytes of a model: all weights, and those of its largest layer (or embedding)."""

    whole: int
    largest: int


def main(work: Work) -> None:
    """Writes the model, and loads it."""
    if work.smoke:
        work = evolve(SMALL, smoke=True)
    with tempfile.TemporaryDirectory() as directory:
        sizes = write_model(Path(directory), work)
        peaks = measured(directory, work)
    share = sizes.whole / work.processes
    table = Table("whole model", "share of a process", "largest layer", "peak of each process", "of share and layer")
    table.add_row(
        *(f"{size / 1e9:.2f} GB" for size in (sizes.whole, share, sizes.largest)),
        ", ".join(f"{peak / 1e9:.2f} GB" for peak in peaks),
        f"{max(peaks) / (share + sizes.largest):.0%}",
    )
    Console(width=110).print(table)
    if not work.smoke:
        figures = {"whole": sizes.whole, "share": share, "largest_layer": sizes.largest, "peaks": peaks}
        name = "load_memory" if work.strategy == "deepspeed" else f"load_memory_{work.strategy}"
        print(f"kept in {keep(name, figures)}")


def write_model(directory: Path, work: Work) -> Sizes:
    """Writes a Llama with noise for weights, in bfloat16, as several safetensors files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=work.hidden,
        intermediate_size=work.feed_forward,
        num_attention_heads=work.heads,
        num_key_value_heads=8,
        num_hidden_layers=work.layers,
        vocab_size=work.vocabulary,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    chance = torch.Generator().manual_seed(0)
    noise = (0.02 * torch.randn(BLOCK_BYTES // 2, generator=chance)).bfloat16().view(torch.uint8).numpy().tobytes()
    names = sorted(shapes)
    index = {name: f"model-{number % FILES + 1:05d}-of-{FILES:05d}.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(index.values())):
        write_file(directory / file, {name: shapes[name] for name in names if index[name] == file}, noise)
    total = 2 * sum(shape.numel() for shape in shapes.values())
    described = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(described), encoding="utf-8")
    layer = 2 * sum(shape.numel() for name, shape in shapes.items() if name.startswith("model.layers.0."))
    return Sizes(total, max(layer, 2 * work.vocabulary * work.hidden))


def write_file(path: Path, shapes: dict[str, torch.Size], noise: bytes) -> None:
    """Writes a safetensors file: the length of its header, the header, and the numbers, which repeat `noise`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while end:
            end -= file.write(noise[:end])


def measured(directory: str, work: Work) -> list[int]:
    """Returns the peaks of new processes, in bytes."""
    context = multiprocessing.get_context("spawn")
    peaks: Queue[tuple[int, int]] = context.Queue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [
        context.Process(target=load, args=(rank, work, store.port, directory, peaks)) for rank in range(work.processes)
    ]
    for process in started:
        process.start()
    try:
        found = dict(peaks.get(timeout=SECONDS) for _ in started)
    finally:
        for process in started:
            process.terminate()
            process.join()
    return [found[rank] for rank in range(work.processes)]


def load(rank: int, work: Work, port: int, directory: str, peaks: "Queue[tuple[int, int]]") -> None:
    """Loads and divides the model as the process `rank`; says by how much its memory grew at most."""
    from rollgrad.adapters.models.deepspeed.forward_only import forward_only
    from rollgrad.adapters.models.deepspeed.processes import start_process_group
    from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings
    from rollgrad.adapters.models.fsdp.division import divide
    from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
    from rollgrad.adapters.models.torch.loading.weight_shards import shard_rows
    from rollgrad.adapters.models.torch.references import TorchReference

    torch.set_num_threads(1)
    start_process_group(rank=rank, size=work.processes, host="127.0.0.1", port=port, local_rank=rank, timeout=SECONDS)
    by_zero = partial(forward_only, division=DeepSpeedSettings(zero_stage=3))
    with tempfile.TemporaryDirectory() as small:
        write_model(Path(small), SMALL)
        for path in (small, directory):  # the small one imports what loading needs
            with Growth() as growth:
                model = load_causal_lm(
                    path, dtype=torch.bfloat16, device=torch.device("cpu"), flag="model", shard=shard_rows
                )
                TorchReference(model, divide=divide if work.strategy == "fsdp2" else by_zero)
    peaks.put((rank, growth.largest))
    torch.distributed.barrier()  # nobody leaves while another still loads


class Growth:
    """By how many bytes this process's own memory grew at most inside the block, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.largest = 0
        self._before = own_memory()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self.largest = max(self.largest, own_memory() - self._before)

    def __enter__(self) -> "Growth":
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()


def own_memory() -> int:
    """Returns the bytes of this process that are no pages of files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


if __name__ == "__main__":
    main(tyro.cli(Work, description=__doc__))
