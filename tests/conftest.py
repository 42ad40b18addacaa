"""Fixtures that many tests share. Tests never reach the network."""

import asyncio
import atexit
import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else whoever asks Ray for a thing starts one, which lasts

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests.scripts import QUIET, ROOT, VLLM_MODULES, ScriptHost
from tests.tiny_models import SHARE, make_tiny_tokenizer, saved, tiny_llama, tiny_model

SLOW_TO_IMPORT = {
    *("vllm", "ray", "trl", "deepspeed", "transformers.modeling_utils", "datasets", "openai", "anthropic"),
    *("textarena", "skyrl_gym", "torch._dynamo", "matplotlib.pyplot"),
}
"""Modules that take a second or more, and that only the tests that use them need."""
LARGE = 2**30
"""Bytes of a test process that has more to give back than it takes to look."""
MANY = 100
"""Modules imported since garbage was last looked for, after which it no longer is in them."""
FROZEN = pytest.StashKey[int]()
"""How many modules there were then."""


RAY = (
    *("integration/test_cluster_training.py", "integration/test_engine_fleet.py", "integration/test_lora_cluster.py"),
    *("integration/test_cluster_models.py", "integration/test_sequence_parallel.py"),
    "integration/test_expert_parallel.py",
    "integration/test_cluster_images.py",
    *("integration/test_tensor_parallel.py", "integration/test_cluster_nodes.py"),
    "integration/test_cluster_places.py",
)
"""Files whose tests start clusters, of which two at once would each wait for the other's processor; all but the last
two share a Ray, and its groups of processes until those of the last of them divide layers among them."""
VLLM = (
    *("contract/test_rollout_engine.py", "contract/test_weight_channel.py", "integration/test_vllm_engine.py"),
    *("integration/test_lora.py", "integration/test_served_engine.py", "integration/test_vllm_starting.py"),
    *("integration/test_reward_in_vllm.py", "integration/test_served_images.py", "e2e/test_chat_and_serve.py"),
    *("integration/test_restarted_vllm.py", "integration/test_vllm_types.py"),
)
"""Files whose tests start vLLM, for which the same holds. The first four share the fixture `_vllm`, which takes as long
to start as any of them."""
IMPORTS_VLLM = (
    *("integration/test_trl_parity.py", "integration/test_trl_offline_parity.py"),  # TRL does, where it is installed
    *("integration/test_weight_loading.py", "integration/test_weight_backends.py"),
    *("integration/test_vllm_division.py", "integration/test_vllm_experts.py", "integration/test_vllm_repairs.py"),
    *("integration/test_vllm_workers.py", "integration/test_vllm_model_repairs.py"),
    "unit/entrypoints/test_library_settings.py",
)
"""Files whose tests import vLLM without starting it, at four seconds of the processor and half a gigabyte."""
LONG = (
    *("e2e/test_demo.py", "integration/test_benchmarks.py", "integration/test_serve_reward.py"),
    "unit/entrypoints/test_way_out.py",
)
"""Other files that take a minute and more; the last would run alone at the end."""
CLUSTER_GPUS = 8
"""GPUs of the largest cluster that tests start, where each process has one of its own."""
FIRST = {file: number for number, file in enumerate((*RAY, *LONG, *VLLM))}
"""Files that begin first, so that short ones even out the end."""


def file_of(nodeid: str) -> str:
    """The path below tests/ of a test there."""
    return nodeid.partition("::")[0].removeprefix("tests/")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Imports leave no garbage: looking for it would take as long as they do, and later whenever tests leave some."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else libraries say that they leak


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.get(file_of(item.nodeid), len(FIRST)))
    for item in items:
        if file_of(item.nodeid) in (*RAY, *VLLM):
            item.add_marker(pytest.mark.engines)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns the scheduler of `--dist loadfile`, which gives all files of RAY to one process, and so those of VLLM,
    those that import it, and those with a browser."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = file_of(nodeid)
            if file.startswith("browser/"):
                return "browser"
            scopes = {"Ray": RAY, "vLLM": VLLM, "imports vLLM": IMPORTS_VLLM}
            return next((name for name, files in scopes.items() if file in files), super()._split_scope(nodeid))

    return Scheduler(config, log)


def pytest_collection_finish() -> None:
    """Each process that runs tests collects them all, however few it runs."""
    found = sorted(SLOW_TO_IMPORT & sys.modules.keys())
    if found:
        raise pytest.UsageError(f"A test module imports {', '.join(found)}: import it in a fixture or in the tests.")


def freeze_imports(stash: pytest.Stash) -> None:
    """Leaves what the last tests have imported out of later collections: each run ends with one, which would take a
    fifth of the run's time."""
    if len(sys.modules) > stash.get(FROZEN, 0) + MANY:
        gc.collect()
        gc.freeze()
        stash[FROZEN] = len(sys.modules)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The Makefile leaves out what needs a GPU where there is none; whoever runs a file alone need not."""
    import torch

    freeze_imports(item.config.stash)

    if item.get_closest_marker("gpu"):
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    elif file_of(item.nodeid) in RAY and 0 < torch.cuda.device_count() < CLUSTER_GPUS:
        pytest.skip(f"needs {CLUSTER_GPUS} GPUs, or none")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of a few hundred tokens with a ChatML template; <|im_end|> ends a reply."""
    return make_tiny_tokenizer()


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command line that ran in a test leaves no log that writes to that test's captured stderr."""
    import structlog

    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True, scope="session")
def _plain_tracebacks() -> None:
    """Tracebacks in the log without the values of all variables, which take a quarter of a second each to write."""
    import structlog

    structlog.reset_defaults()  # modules of tests may have used a public name, which configures a log
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


@pytest.fixture(autouse=True, scope="session")
def _short_names_of_configurations() -> Iterator[None]:
    """transformers writes each configuration that it loads for a log that nobody reads, in as long as loading takes: a
    twelfth of the time of all unit tests."""
    from transformers import PreTrainedConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedConfig, "__repr__", object.__repr__)
        yield


@pytest.fixture(autouse=True, scope="session")
def _servers_wait_little() -> Iterator[None]:
    """Servers of this process: uvicorn looks every tenth of a second whether it is to stop and whether all is closed,
    and clients that are refused while they send are made to wait."""
    import uvicorn.server

    from rollgrad.adapters.servers import connections

    often = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 20)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", often)
        patch.setattr(connections, "DISCARD_SECONDS", 0.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def whole_reports() -> Iterator[Callable[[pytest.MonkeyPatch], None]]:
    """Gives reports their charts and their rollouts, which those of runs in tests lack: they take as long as the run.
    The reports' own tests have them, and so does a command that runs in a process of its own."""
    from rollgrad.adapters.tracking import curves
    from rollgrad.entrypoints.ui import report

    without: tuple[tuple[Any, str, Any], ...] = (
        (curves, "PANELS", ()),
        (report, "MOST_ROLLOUTS", 0),
        (report, "MOST_PROMPTS", 0),
    )
    whole = [(module, name, getattr(module, name)) for module, name, _ in without]

    def give(patch: pytest.MonkeyPatch) -> None:
        for place in whole:
            patch.setattr(*place)

    with pytest.MonkeyPatch.context() as patch:
        for place in without:
            patch.setattr(*place)
        yield give


@pytest.fixture(autouse=True, scope="session")
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clients over HTTP that tests and agents make read one certificate: all that are trusted take each client a
    thirtieth of a second, and no test reaches the network."""
    import certifi

    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(first + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(autouse=True, scope="session")
def _passes_are_measured_once() -> Iterator[None]:
    """Dry runs measure the passes of a model by its settings, which takes most of their time, once for all tests that
    ask the same of the same settings. The tests of measuring itself call the function as it is."""
    from rollgrad.adapters.models.torch.planning import pass_memory

    found: dict[Any, Any] = {}
    measure = pass_memory.measured_passes

    def once(name: str, **asked: Any) -> Any:
        settings = Path(name).expanduser() / "config.json"
        if not settings.is_file():
            return measure(name, **asked)
        key = settings.read_bytes(), *sorted(asked.items())
        if key not in found:
            found[key] = measure(name, **asked)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_memory, "measured_passes", once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps what `datasets` caches out of the user's home."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(tmp_path_factory.mktemp("datasets-cache"))


@pytest.fixture(scope="session")
def script_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptHost]:
    """Runs Python programs without the imports that most of them need."""
    host = ScriptHost(tmp_path_factory.mktemp("scripts"))
    yield host
    host.close()


@pytest.fixture(scope="session")
def run_script(script_host: ScriptHost) -> Callable[..., str]:
    """Runs a script of the repository, or `-m` and a module, with its arguments; returns what it printed."""
    return script_host.run


@pytest.fixture
def rollgrad_command(script_host: ScriptHost) -> list[str]:
    """Words for `subprocess` that stand for `rollgrad`, where how it starts is not what is tested."""
    return [*script_host.python(), "-m", "rollgrad.entrypoints.cli.main"]


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama of two layers with grouped heads and random weights, with `tiny_tokenizer` beside it."""
    return tiny_llama(tiny_tokenizer, tmp_path_factory.mktemp("models") / "tiny-llama", head_dim=16)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct, where the demos keep it."""
    from rollgrad.adapters.system.python_file import load_python_file

    example = load_python_file(str(ROOT / "examples" / "smollm2.py"), flag="the examples' model")
    path: Path = ROOT / example.MODEL
    example.unpack_smollm2(path)
    return path


@pytest.fixture(scope="session")
def wide_headed_model_dir(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama like `tiny_model_dir`'s with heads of 32 numbers, the least that vLLM's attention has on a CPU."""
    return tiny_llama(tiny_tokenizer, tmp_path_factory.mktemp("models") / "wide-headed-llama", head_dim=32)


@pytest.fixture(scope="session")
def reward_model_dir(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved sequence classifier with one label and random weights, with `tiny_tokenizer` beside it."""
    model = tiny_model("LlamaForSequenceClassification", tiny_tokenizer, num_labels=1, max_position_embeddings=128)
    return saved(model, tiny_tokenizer, tmp_path_factory.mktemp("models") / "tiny-reward-model")


@pytest.fixture(scope="session")
def tiny_mixture_dir(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Qwen3 with four experts in each of its two layers, and heads that vLLM's attention has on a CPU."""
    model = tiny_model(
        "Qwen3MoeForCausalLM",
        tiny_tokenizer,
        hidden_size=64,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
    )
    return saved(model, tiny_tokenizer, tmp_path_factory.mktemp("models") / "tiny-mixture")


@pytest.fixture(autouse=True, scope="module")
def _freed_memory_is_given_back() -> None:
    """Models that tests of modules before have trained in this process would leave gigabytes in it, while others run
    beside it. At the end of a module its last test still holds what it was given, which would be frozen for good."""
    if psutil.Process().memory_info().rss > LARGE:
        from rollgrad.adapters.models.torch.allocator import give_back_freed_memory

        gc.collect()
        gc.freeze()  # else each time would look through the modules that are imported, which takes half a second
        give_back_freed_memory()


@pytest.fixture(scope="session")
def vllm_host(tmp_path_factory: pytest.TempPathFactory, script_host: ScriptHost) -> Iterator[ScriptHost]:
    """Runs Python programs, the cores of vLLM engines among them, without the imports that vLLM needs; where there are
    GPUs, which are lost in a fork, with them, and no cores."""
    import torch

    from tests.forked_spawns import forked_by

    on_gpus = torch.cuda.is_available()
    if on_gpus:
        host = ScriptHost(tmp_path_factory.mktemp("vllm"), (), QUIET)
    else:
        host = ScriptHost(tmp_path_factory.mktemp("vllm"), VLLM_MODULES, QUIET, within=script_host)
    with nullcontext() if on_gpus else forked_by(host.python()):
        yield host
    host.close()


@pytest.fixture(scope="session")
def _vllm(wide_headed_model_dir: Path, vllm_host: ScriptHost) -> Iterator[Any]:
    """Serves all modules: it takes longer to start than most of them."""
    from rollgrad.adapters.engines.vllm.engine import VLLMEngine

    engine = VLLMEngine(
        str(wide_headed_model_dir), eos_token_ids=(), dtype="float32", max_batch_size=64, memory_fraction=SHARE
    )
    yield engine
    engine.close()


async def _made_ready(engine: Any) -> None:
    await engine.wake()
    await engine.resume()
    engine.set_version(0)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def _vllm_in_module(_vllm: Any, wide_headed_model_dir: Path) -> Any:
    """The engine without the weights that tests of another module have pushed."""
    import torch

    from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
    from rollgrad.adapters.models.torch.models import TorchPolicy
    from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
    from rollgrad.adapters.weights.channel import EngineWeights

    path = str(wide_headed_model_dir)
    model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag="path")
    policy = TorchPolicy(model, load_tokenizer(path, flag="path"), OptimizerSettings(lr=0.0))
    await _made_ready(_vllm)
    await EngineWeights(_vllm).push(policy, 0)
    return _vllm


@pytest_asyncio.fixture(loop_scope="session")
async def vllm_engine(_vllm_in_module: Any) -> Any:
    """A `VLLMEngine` of `wide_headed_model_dir` in float32, awake, running, at version 0, for tests that run in the
    session's event loop."""
    await _made_ready(_vllm_in_module)
    return _vllm_in_module


@pytest.fixture
def algorithms_as_before() -> Iterator[None]:
    """Takes back what a test registers."""
    from rollgrad.domain.algorithms import catalogue, estimators, losses
    from rollgrad.domain.algorithms.losses import kl

    tables: list[dict[str, Any]] = [
        catalogue.ESTIMATORS,
        catalogue.POLICY_LOSSES,
        estimators.ESTIMATORS,
        losses.POLICY_LOSSES,
        kl.OWN,
    ]
    before, names = [dict(table) for table in tables], [*catalogue.KL_ESTIMATORS]
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)
    catalogue.KL_ESTIMATORS[:] = names
