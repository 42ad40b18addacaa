"""Bad inputs of whole commands, for `tests.fuzz`: chat, the servers, translations, and models on the disk.

A command that is not refused goes as far as it can: a reply to one message, a port that is bound and let go.
"""

import contextlib
import io
import json
import random
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

from rollgrad.adapters.servers import server as serving
from rollgrad.domain.errors import RollgradError
from rollgrad.entrypoints.cli.exit_status import EXIT_ERROR
from rollgrad.entrypoints.cli.main import main
from tests.fuzz_cases import Case, flipped
from tests.tiny_models import make_tiny_tokenizer, saved, tiny_llama, tiny_model

WORDS = ["", " ", "\0", "x" * 10_000, "-1", "1e999", "nan", "9" * 5001, "\u2028", "\udcff", "../..", "/dev/null", "[]",
         "None", "--", "-", "=", "true", "0x10", "ä", "{", "a\nb", "1.5"]  # fmt: skip
NO_FILES = ["", "\0", "x" * 300, "no/such/file", "/proc/self/mem"]
FILES = {
    "deep.json": b"[" * 100_000,
    "null.json": b"null",
    "odd.json": b'[{"role": []}, 3]',
    "nothing.txt": b"",
    "latin-1": b"\xe4",
}
FLAGS: dict[str, dict[str, list[str]]] = {
    "chat": {
        "--temperature": ["-1", "nan", "x", ""],
        "--top_p": ["0", "2", "nan", "x"],
        "--top_k": ["-1", "x", "1.5", ""],
        "--max_new_tokens": ["0", "-1", "x", "nan", "1e3"],
        "--max_turns": ["0", "-1", "x"],
        "--seed": ["x", "1.5", ""],
        "--dtype": ["float3", "", "\0"],
        "--python_isolation": ["x", ""],
        "--tools": ["nothing", "\0", "no/such.py", "mcp:", "python,", "mcp:no/such/command", "mcp:http://[::1"],
        "--messages": [*NO_FILES, "deep.json", "null.json", "odd.json", "."],
        "--system_prompt": [],
        "--prompt": [],
    },
    "serve agent": {
        "--host": ["x", "\0", "999.1.1.1", "x" * 300],
        "--port": ["-1", "70000", "x", "1.5", ""],
        "--token_file": [*NO_FILES[2:], "nothing.txt", "latin-1", "."],
        "--ssl_certfile": [*NO_FILES[2:], "null.json", "."],
        "--ssl_keyfile": [*NO_FILES[2:], "null.json", "."],
        "--temperature": ["-1", "x"],
        "--max_turns": ["0"],
    },
    "serve reward": {
        "--host": ["x", "\0"],
        "--port": ["-1", "70000", "x"],
        "--token_file": ["no/such/file", "nothing.txt", "latin-1", "."],
        "--max_length": ["0", "-1", "x"],
        "--batch_tokens": ["0", "-1", "x"],
        "--dtype": ["float3"],
    },
    "serve tinker": {
        "--host": ["x", "\0"],
        "--port": ["-1", "70000", "x"],
        "--token_file": ["no/such/file", "nothing.txt", "latin-1", "."],
        "--batch_tokens": ["0", "-1", "x"],
        "--dtype": ["float3"],
    },
}
"""Values that each command has to refuse."""
TRANSLATED = {
    "openrlhf": shlex.split("""python3 -m openrlhf.cli.train_ppo_ray --pretrain m --reward_pretrain r
 --remote_rm_url reward.py --prompt_data d.jsonl
 --input_key input --train_batch_size 128 --rollout_batch_size 1024 --n_samples_per_prompt 8
 --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024 --zero_stage 3 --param_dtype bf16
 --actor_learning_rate 5e-7 --init_kl_coef 0.01 --advantage_estimator gae --vllm_num_engines 4 --eps_clip_low_high 0.2
 0.27 --dynamic_filtering --dynamic_filtering_reward_range 0 1 --colocate_all_models --save_path out"""),
    "verl": shlex.split("""python3 -m verl.trainer.main_ppo --config-name=ppo_trainer algorithm.adv_estimator=grpo
 data.train_files="['a.parquet','b.parquet']" data.train_batch_size=64 actor_rollout_ref.model.path=m
 +data.apply_chat_template_kwargs={enable_thinking:False} actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=4
 actor_rollout_ref.actor.clip_ratio_high=0.28 ~actor_rollout_ref.actor.clip_ratio_c trainer.logger=[console]
 actor_rollout_ref.actor.use_kl_loss=True algorithm.rollout_correction.rollout_is=token trainer.save_freq=5
 actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml trainer.total_training_steps=null"""),
}
"""Command lines of other tools that are translated."""


def outcome_of(words: Sequence[str], typed: str = "") -> None:
    """Runs a command; raises one of rollgrad's errors if it was refused, with what it said."""
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
        patch("sys.stdin", io.StringIO(typed)),
        patch.object(serving, "serve_until_signal", lambda server, **_: server._bind().close()),
    ):
        status = main(words)
    text = said.getvalue()
    assert status in (0, EXIT_ERROR), f"status {status}: {text[-1000:]}"
    assert "Traceback" not in text, text[-1000:]
    if status == EXIT_ERROR:
        assert "error: " in text
        raise RollgradError(text)


def models(folder: Path) -> dict[str, Path]:
    """The models that commands name, and the files beside them."""
    found = {name: folder / name for name in ("chat", "reward")}
    if not found["chat"].is_dir():
        tokenizer = make_tiny_tokenizer()
        tiny_llama(tokenizer, found["chat"], head_dim=16)
        saved(tiny_model("LlamaForSequenceClassification", tokenizer, num_labels=1), tokenizer, found["reward"])
        for name, content in FILES.items():
            (folder / name).write_bytes(content)
    return found


def commands(draw: random.Random, folder: Path) -> Case:
    """A flag of another kind, of one of the commands that keep a model, or in a command line of another
    tool."""
    places = models(folder)
    if draw.random() < 0.3:
        return translated(draw)
    name = draw.choice(list(FLAGS))
    words = [*name.split(), "--model", str(places["reward" if name == "serve reward" else "chat"])]
    words += ["--prompt", "go", "--max_new_tokens", "2"] if name == "chat" else ["--port", "0"]
    flag = draw.choice(list(FLAGS[name]))
    bad = FLAGS[name][flag]
    refused = bool(bad) and draw.random() < 0.7
    value = draw.choice(bad if refused else WORDS)
    how = draw.random()
    if how < 0.1:
        words, refused = [*words, f"--{draw.choice(WORDS)}", value], False
    elif how < 0.2:
        words[words.index("--model") + 1], refused = (
            draw.choice(["", "\0", "no/such", "x" * 5000, "/", ".", "deep.json"]),
            True,
        )
    else:
        while flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
        words += [f"{flag}={value}"] if value.startswith("-") else [flag, value]
        if flag != "--prompt" and name == "chat" and "--prompt" not in words:
            words += ["--prompt", "go"]
    words = [str(folder / word) if word in FILES else word for word in words]
    return Case(f"command {shlex.join(words)[:300]!r}", lambda: outcome_of(words, "hello\n/new\n"), refused=refused)


def translated(draw: random.Random) -> Case:
    """A translated command with words exchanged, left out or put in."""
    tool = draw.choice(list(TRANSLATED))
    words = list(TRANSLATED[tool])
    for _ in range(draw.choice([1, 1, 2, 5])):
        place, how = draw.randrange(len(words)), draw.randrange(4)
        if how == 0:
            words[place] = draw.choice(WORDS)
        elif how == 1:
            del words[place]
        elif how == 2:
            words.insert(place, draw.choice(WORDS))
        else:
            words[place] = (
                flipped(draw, words[place].encode(errors="surrogateescape")).decode(errors="surrogateescape")
                if words[place]
                else "x"
            )
    return Case(f"{tool} {shlex.join(words)[-300:]!r}", lambda: outcome_of([tool, *words]))


def checkpoints(draw: random.Random, folder: Path) -> Case:
    """A model on the disk of which a file is damaged or missing."""
    kind, whole = draw.choice(list(models(folder).items()))
    name = draw.choice(sorted(path.name for path in whole.iterdir()))
    content = (whole / name).read_bytes()
    kinds: list[tuple[Callable[[], bytes | None], bool]] = [
        (lambda: flipped(draw, content), False),
        (lambda: content[: draw.randrange(len(content))], name == "model.safetensors"),
        (lambda: b"", name in ("config.json", "model.safetensors")),
        (lambda: json.dumps(draw.choice([None, [], 3, "x", {}, [[]]])).encode(), name == "model.safetensors"),
        (lambda: None, name in ("config.json", "model.safetensors")),
        (lambda: b"[" * 100_000, name in ("config.json", "model.safetensors")),
    ]
    number = draw.randrange(len(kinds))
    make, refused = kinds[number]
    if name == "config.json" and draw.random() < 0.6:  # one setting of another kind
        changed = json.loads(content)
        key = draw.choice(list(changed))
        changed[key] = draw.choice([None, -1, 0, 10**30, "x", [], {}, 1e308, True, ["x"]])
        damaged: bytes | None = json.dumps(changed).encode()
        refused, number = False, 10
    else:
        damaged = make()
    place = folder / "damaged"

    def run() -> None:
        shutil.copytree(whole, place)
        try:
            if damaged is None:
                (place / name).unlink()
            else:
                (place / name).write_bytes(damaged)
            if kind == "chat":
                outcome_of(["chat", "--model", str(place), "--prompt", "go", "--max_new_tokens", "2"])
            else:
                outcome_of(["serve", "reward", "--model", str(place), "--port", "0"])
        finally:
            shutil.rmtree(place)

    shown = b"" if damaged is None else damaged[:1000]
    return Case(f"{kind} model: {name} {number} {shown!r}", run, refused=refused)
