"""`--dry_run` refuses what the run would, all at once; strangers' data needs no names of columns."""

import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.training import NEW_OBJECTS
from rollgrad.entrypoints.findings import FINE
from tests.example_runs import logged
from tests.tiny_architectures import tiny_model

VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{a}+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + 1)},
        "extra_info": {"index": a},
    }
    for a in range(4)
]
TRL = [{"prompt": [{"role": "user", "content": f"{a}+1?"}], "solution": str(a + 1)} for a in range(4)]
TRL_TEXT = [{"prompt": f"{a}+1?", "answer": str(a + 1)} for a in range(4)]
GSM8K = [{"question": f"{a}+1?", "answer": f"{a} and 1 make <<{a}+1={a + 1}>>.\n#### {a + 1}"} for a in range(4)]
SETTINGS = "Settings that differ from the defaults (all of them: --print_config):"
SCHEMAS = {"verl": VERL, "trl": TRL, "trl_text": TRL_TEXT, "gsm8k": GSM8K}


@pytest.fixture
def run(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Runs `train rl` with small settings; returns status, stdout, the `error:` lines and the other lines of stderr."""
    settings = {
        "actor": {"model_name_or_path": str(tiny_model_dir), "dtype": "float32"},
        "algo": {"advantage": {"estimator": "group_norm"}},
        "data": {"prompt_dataset": "prompts.jsonl"},
        "reward": {"verifier": "last_number"},
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 4},
        "train": {"max_steps": 1},
        "logger": {"console": False},
        "ckpt": {"output_dir": "out"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return [0.5] * len(queries)\n")
    monkeypatch.chdir(tmp_path)
    write("prompts.jsonl", GSM8K)

    def rollgrad(*flags: str) -> tuple[int, str, list[str], list[str]]:
        status = main(["train", "rl", "--config", "run.yaml", *flags])
        printed = capsys.readouterr()
        lines = printed.err.splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return status, printed.out, errors, [line for line in lines if not line.startswith("error: ")]

    return rollgrad


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_rows_of_other_systems_are_shown_and_trained_on_without_naming_columns(run: Any, schema: str) -> None:
    import datasets

    datasets.Dataset.from_list(SCHEMAS[schema]).to_parquet("rows.parquet")
    data = ("--data.prompt_dataset", "rows.parquet", "--eval.dataset", "rows.parquet")
    status, output, errors, others = run(*data, "--dry_run")
    assert (status, errors) == (0, [])
    columns = {
        "verl": "openai/gsm8k: prompts from column prompt, labels from column reward_model.ground_truth",
        "trl": "rows: prompts from column prompt, labels from column solution",
        "trl_text": "rows: prompts from column prompt, labels from column answer",
        "gsm8k": "rows: prompts from column question, labels from column answer",
    }
    assert sum(columns[schema] in line for line in others) == 2  # of training and of evaluation
    assert "<|im_start|>user\n" in output
    assert "+1?<|im_end|>\n<|im_start|>assistant\n" in output
    assert output.count(") is 1.") == 2  # the label itself as the reply
    assert re.search(r"A step takes at least [\d.]+ s if", output)
    assert not Path("out").exists()
    assert run(*data)[0] == 0
    (metrics, *_) = logged(Path("out"))[1:]
    assert metrics["rollout/samples"] == 4.0


def test_garbage_is_looked_for_less_often_while_it_checks(run: Any) -> None:
    """It imports much, of which nothing is garbage."""
    reward = (
        "import gc\n\ndef reward_func(queries, prompts, labels):\n    return [gc.get_threshold()[0]] * len(queries)\n"
    )
    Path("reward.py").write_text(reward)
    before = gc.get_threshold()
    status, output, errors, _ = run("--dry_run", "--reward.verifier", "None", "--reward.function_path", "reward.py")
    assert (status, errors) == (0, [])
    assert f"is {NEW_OBJECTS:g}." in output
    assert gc.get_threshold() == before


def test_memory_is_that_of_the_prompts_there_are(run: Any) -> None:
    def activations() -> int:
        status, output, errors, _ = run("--dry_run", "--rollout.batch_size", "64")
        assert (status, errors) == (0, [])
        (row,) = re.findall("│actor.*", output)
        assert "activations" in output  # headings are whole where there are 80 columns
        return int(row.split("│")[7].replace(",", ""))

    short = activations()
    write("prompts.jsonl", [*GSM8K, {"question": "1+" * 200 + "1?", "answer": "201"}])
    assert activations() > short


def test_machines_that_are_not_here_are_planned_for(run: Any) -> None:
    joined = ("--dry_run", "--cluster.enable", "--cluster.address", "auto", "--train.colocate_all")
    joined += ("--rollout.engine", "vllm")
    assert "tell what they have by --cluster.plan_for" in run(*joined)[1]
    status, output, errors, _ = run(*joined, "--cluster.plan_for", "80", "2048", "989")
    assert (status, errors) == (0, [])
    assert "on machines of 2,048 GiB with GPUs of 80 GiB" in output
    assert "at 989.000 TFLOP/s, as --cluster.plan_for says" in output
    assert "weights go to the engines by cuda_ipc\n" in output
    assert "tell what they have" not in output
    assert "shared GPU" in output
    assert "GPUs of the run: 1 (1 of actor, engines)\n" in output
    assert "activations" in output  # headings are whole where there are 80 columns
    status, _, errors, _ = run(*joined, "--cluster.plan_for", "0.1", "2048", "989")
    assert status == 2
    assert any("a GPU of actor, engines would hold" in error for error in errors)


def test_episodes_that_nothing_bounds_are_told(run: Any) -> None:
    turns = ("--dry_run", "--agent.attempts", "2")
    status, output, errors, _ = run(*turns)
    assert (status, errors) == (0, [])
    assert "No setting bounds an episode of several turns: the plan takes 1,028 tokens" in output
    assert "No setting bounds" not in run(*turns, "--rollout.max_episode_tokens", "300")[1]


def test_a_prompt_is_shown_with_the_tools_that_the_model_is_offered(run: Any) -> None:
    flags = ("--dry_run", "--agent.system_prompt", "Think first.", "--rollout.max_episode_tokens", "2000")
    status, output, errors, _ = run(*flags, "--agent.tools", "think")
    assert (status, errors) == (0, [])
    shown = output.partition("A prompt, as the model sees it (")[2]
    assert "Think first." in shown
    assert '"name": "think"' in shown
    Path("broken.py").write_text("raise SystemExit(1)")
    status, output, errors, _ = run(*flags, "--agent.tools", f"think,mcp:{sys.executable} broken.py")
    assert status == 2
    assert len(errors) == 1
    assert "broken.py' cannot be used" in errors[0]


def test_all_names_that_are_no_tools_are_told(run: Any) -> None:
    _, _, errors, _ = run("--dry_run", "--agent.tools", "hammer,absent.py,think")
    assert [any(name in error for error in errors) for name in ("'hammer'", "'absent.py'")] == [True, True]


def test_everything_that_is_wrong_is_told_at_once(run: Any) -> None:
    """Settings, files, data, reward and memory; what is right is shown all the same."""
    write("prompts.jsonl", [*GSM8K, {"question": "", "answer": "1"}])
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace("max_steps: 1", "max_steps: one\n  stepz: 3"))
    status, output, errors, _ = run(
        "--dry_run",
        *("--rollout.top_p", "3", "--eval.dataset", "nothing.jsonl", "--ckpt.output_dir", "reward.py/out"),
        *("--reward.verifier", "None", "--reward.function_path", "nowhere.py"),
        *("--train.max_tokens_per_micro_batch", str(10**12), "--rollout.batch_size", "100000000"),
        *("--agent.tools", "hammer"),
    )
    assert status == 2
    wrong = ["train.max_steps is 'one'", "train.stepz is not a setting", "rollout.top_p is 3.0", "nothing.jsonl"]
    wrong += ["reward.py is no directory", "nowhere.py", "Row 5 of data.prompt_dataset", "may not fit", "'hammer'"]
    for words in wrong:
        assert sum(words in line for line in errors) == 1, (words, errors)
    assert len(errors) == len(wrong)
    first, *_, last = output.splitlines()
    assert first == f"{len(wrong)} problems would stop this run, named at the end."
    assert last == f"{len(wrong)} problems would stop this run:"
    assert 'data.prompt_dataset: "prompts.jsonl"' in output


def test_the_plan_says_where_an_optimizer_is_not_what_it_counts(run: Any) -> None:
    Path("sign.py").write_text("from torch.optim import SGD as optim")
    words = {
        (): "",
        ("--actor.optim", "muon"): "actor's optimizer is an upper bound",
        ("--actor.optim_path", "sign.py"): "actor's optimizer counts two numbers a parameter",
    }
    for flags, said in words.items():
        status, output, errors, _ = run("--dry_run", *flags)
        assert (status, errors) == (0, [])
        flat = " ".join(output.split())
        assert said in flat
        assert ("actor's optimizer" in flat) is bool(said)


def test_what_is_printed_fits_on_one_screen_and_begins_and_ends_with_the_verdict(run: Any) -> None:
    status, output, errors, _ = run("--dry_run")
    assert (status, errors) == (0, [])
    lines = output.splitlines()
    assert lines[0] == lines[-1] == FINE
    assert len(lines) < 50
    order = [output.index(words) for words in ("Memory plan", "Counts: 1 rollout of", "A prompt, as", "Settings that")]
    assert order == sorted(order)
    settings = dict(line.split(": ") for line in lines[lines.index(SETTINGS) + 1 : -2])
    assert settings["rollout.n_samples_per_prompt"] == "2"
    assert json.loads(settings["data.prompt_dataset"]) == "prompts.jsonl"
    assert "train.seed" not in settings, "a default"


@pytest.mark.parametrize(
    ("rows", "flags", "words"),
    [
        ([{"text": "a"}], "", "--data.input_key"),
        ([{"question": "a", "problem": "b", "answer": "1"}], "", "question and problem"),
        ([{"question": "a", "answer": "1", "solution": "1"}], "", "answer and solution"),
        ([{"question": "a"}], "", "--data.label_key"),
        (VERL, "--data.label_key reward_model", "--data.label_key reward_model.ground_truth"),
        (GSM8K, "--data.max_prompt_tokens 3", "--data.max_prompt_tokens"),
        (GSM8K, "--data.max_prompt_tokens 3 --data.overlong error", "--data.max_prompt_tokens"),
        (GSM8K, "--rollout.max_new_tokens 511", "set --data.max_len 512, or lower --rollout.max_new_tokens"),
        (GSM8K, "--data.chat_template missing.jinja", "missing.jinja"),
        (GSM8K, "--data.chat_template {%if", "no Jinja template"),
        (GSM8K, "--data.chat_template_kwargs enable_thinking false", "does not read"),
        (GSM8K, "--reward.verifier None --reward.function_path broken.py", "raised KeyError"),
        (GSM8K, "--reward.verifier None --reward.function_path short.py", "returned 0 rewards"),
        (GSM8K, "--reward.verifier None --reward.model_name_or_path runs/rm/model", "runs/rm/model'"),
    ],
)
def test_it_refuses_what_the_run_refuses(run: Any, rows: list[dict[str, Any]], flags: str, words: str) -> None:
    write("prompts.jsonl", rows)
    Path("broken.py").write_text("def reward_func(queries, prompts, labels):\n    raise KeyError('x')\n")
    Path("short.py").write_text("def reward_func(queries, prompts, labels):\n    return []\n")
    for trial in (["--dry_run"], []):
        status, _, errors, _ = run(*flags.split(), *trial)
        assert status == 2, trial
        assert len(errors) == 1, errors
        assert words in errors[0]
    assert not Path("out/model").exists()


def test_what_cannot_be_asked_is_said(run: Any, reward_model_dir: Path) -> None:
    off = ("--dry_run", "--reward.verifier", "None")
    status, output, errors, _ = run(*off, "--reward.remote_url", "http://127.0.0.1:9")
    assert (status, errors) == (0, [])
    assert "The reward server is not asked here" in output
    status, output, errors, _ = run(*off, "--reward.model_name_or_path", str(reward_model_dir))
    assert (status, errors) == (0, [])
    assert "The reward model is not loaded here" in output


def test_a_prompt_and_its_reply_share_one_budget(run: Any) -> None:
    write("prompts.jsonl", [{"question": "z" * 40 + str(index), "answer": "1"} for index in range(4)])
    flags = ("--data.no_apply_chat_template",)
    status, _, errors, _ = run(*flags, "--data.max_len", "44", "--rollout.max_new_tokens", "400", "--dry_run")
    assert (status, errors) == (0, [])
    assert run(*flags, "--data.max_len", "44", "--rollout.max_new_tokens", "400")[0] == 0
    (metrics,) = logged(Path("out"))
    assert 1 <= metrics["rollout/response_length_mean"] <= 3  # 41 tokens are the prompt's


def test_a_template_of_ones_own_writes_all_prompts_and_is_saved_with_the_model(run: Any) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% if not enable_thinking %} <think></think>{% endif %}{% endif %}"
    )
    Path("template.jinja").write_text(template)
    for given in ("template.jinja", template):
        flags = ("--data.chat_template", given, "--data.chat_template_kwargs", "enable_thinking", "false")
        status, output, errors, _ = run(*flags, "--dry_run")
        assert (status, errors) == (0, [])
        assert "+1?\n[assistant] <think></think>" in output
    flags = (*flags[:-1], "True")
    assert run(*flags, "--eval.dataset", "prompts.jsonl")[0] == 0
    samples = [json.loads(line) for line in Path("out/samples.jsonl").read_text().splitlines()]
    assert all(json.dumps(sample).count("[assistant]") and "<think>" not in json.dumps(sample) for sample in samples)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained("out/model").chat_template == template


def test_models_that_are_computed_padded_are_named(run: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    tiny_model("bloom", vocab_size=len(tiny_tokenizer)).save_pretrained(tmp_path / "bloom")
    tiny_tokenizer.save_pretrained(tmp_path / "bloom")
    padded = "computed with padding, exactly but slower"
    kl = ("--algo.kl.init_coef", "0.1", "--dry_run")
    assert padded not in run(*kl)[1]
    output = " ".join(run("--actor.model_name_or_path", str(tmp_path / "bloom"), *kl)[1].split())
    assert f"actor: {padded}" in output
    assert f"reference: {padded}" in output


@pytest.mark.parametrize("trial", [["--dry_run"], []])
def test_a_reward_model_writes_no_replies_but_may_learn_on(run: Any, reward_model_dir: Path, trial: list[str]) -> None:
    model = ["--actor.model_name_or_path", str(reward_model_dir)]
    status, _, errors, _ = run(*model, *trial)
    assert status == 2
    assert len(errors) == 1, errors
    assert "ForSequenceClassification, which judges texts and writes none" in errors[0]
    write("pairs.jsonl", [{"prompt": f"{a}+1?", "chosen": str(a + 1), "rejected": str(a)} for a in range(4)])
    pairs = ["--data.dataset", "pairs.jsonl", "--train.max_steps", "1", "--ckpt.output_dir", "trained", *trial]
    assert main(["train", "dpo", *model, *pairs]) == 2
    assert not Path("trained/model").exists()
    assert main(["train", "rm", *model, *pairs, "--ckpt.overwrite"]) == 0
