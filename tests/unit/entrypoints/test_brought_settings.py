"""A policy loss or estimator from one file brings settings: flags, --help, YAML, ranges and rules come with them."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import cloudpickle
import pytest
import torch
import yaml

from rollgrad.adapters.ray.session import send_users_classes_whole
from rollgrad.application.settings.brought import with_brought
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.algorithms import catalogue
from rollgrad.domain.algorithms.catalogue import EstimatorTraits
from rollgrad.domain.algorithms.estimators import Advantages, EstimatorInput, EstimatorParams, estimate, estimator
from rollgrad.domain.algorithms.losses.contract import PolicyLoss, PolicyLossInput, PolicyLossParams, policy_loss
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import TokenScores
from rollgrad.domain.settings import setting
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.parsing import TrainArguments, parse_run
from rollgrad.entrypoints.composition.rl.algorithm import make_objective
from rollgrad.entrypoints.config_io import dump_config, load_config, setting_names
from rollgrad.entrypoints.description import check_continues, flat_settings
from tests.unit.domain.test_losses import batch_of

LOSS = """
import torch
from attrs import define

import rollgrad
from rollgrad.domain.algorithms.losses.contract import PolicyLoss
from rollgrad.domain.settings import POSITIVE


@define(kw_only=True)
class ToySettings:
    "How the toy loss pulls."

    strength: float = rollgrad.setting(0.5, "How hard it pulls.", POSITIVE)
    upwards: bool = rollgrad.setting(False, "Pull log-probs up.")


@rollgrad.policy_loss("toy", settings=ToySettings)
def toy(inputs, params, settings):
    never_N = torch.zeros_like(inputs.action_mask_N)
    sign = -1.0 if settings.upwards else 1.0
    loss_N = sign * settings.strength * inputs.logprobs_N
    return PolicyLoss(loss_N=loss_N, ratio_N=torch.ones_like(loss_N), clipped_low_N=never_N, clipped_high_N=never_N)
"""
STRENGTH = "algo.losses.toy.strength"
NEEDED = ["--actor.model_name_or_path", "org/m", "--data.prompt_dataset", "org/d", "--reward.verifier", "last_number"]


@pytest.fixture
def plugin(tmp_path: Path, algorithms_as_before: None) -> str:
    path = tmp_path / "toy.py"
    path.write_text(LOSS, encoding="utf-8")
    return str(path)


def parsed(*words: str) -> RLConfig:
    _, config, unread = parse_run(TrainArguments, RLConfig, "train rl", words)
    assert unread == []
    return config


def gradient(config: RLConfig) -> torch.Tensor:
    objective = make_objective(config, kl_coef=0.0, entropy_coef=0.0, version=0)
    batch = batch_of(3, "token_mean")
    leaf = torch.zeros(batch.token_count, dtype=torch.float64, requires_grad=True)
    loss = objective(TokenScores(logprobs_N=leaf, entropy_N=torch.zeros_like(leaf)), batch).loss
    return torch.autograd.grad(loss, leaf)[0]


def test_the_loss_gets_its_settings_from_flags(plugin: str) -> None:
    chosen = ["--algo.extension_path", plugin, "--actor.policy_loss_type", "toy"]
    default = gradient(parsed(*chosen))
    assert default.abs().sum() > 0
    config = parsed(*chosen, f"--{STRENGTH}=2", "--algo.losses.toy.upwards")
    torch.testing.assert_close(gradient(config), -4 * default)
    torch.testing.assert_close(gradient(parsed(*chosen, "--algo.losses.toy.no-upwards")), default)


def test_a_run_made_in_python_has_the_defaults(plugin: str) -> None:
    config = RLConfig()  # made before the file is read
    default = gradient(parsed("--algo.extension_path", plugin, "--actor.policy_loss_type", "toy"))
    config.actor.policy_loss_type = "toy"
    torch.testing.assert_close(gradient(config), default)


def test_yaml_names_file_and_settings_and_reads_back(plugin: str, tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "actor": {"policy_loss_type": "toy"},
        "algo": {"extension_path": plugin, "losses": {"toy": {"strength": 2.0}}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    config = load_config(path)
    assert yaml.safe_load(dump_config(config))["algo"]["losses"] == {"toy": {"strength": 2.0, "upwards": False}}
    path.write_text(dump_config(config), encoding="utf-8")
    assert dump_config(load_config(path)) == dump_config(config)
    overridden = parsed("--config", str(path), f"--{STRENGTH}", "3")
    assert flat_settings(overridden)[STRENGTH] == 3.0
    assert flat_settings(config)[STRENGTH] == 2.0


def test_help_and_print_config_show_the_settings(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--algo.extension_path", plugin]
    for topic in ("all", "algo.losses", "algo", STRENGTH):
        assert main(["train", "rl", *chosen, "--help", topic]) == 0
        assert f"--{STRENGTH} NUMBER (default: 0.5)\n      How hard it pulls." in capsys.readouterr().out
    assert main(["train", "rl", *chosen, *NEEDED, "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["algo"]["losses"]["toy"]["strength"] == 0.5


def test_ranges_and_use_are_checked_with_all_other_problems(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "rl", "--algo.extension_path", plugin, "--print_config", *NEEDED]
    assert main([*words, "--actor.policy_loss_type", "toy", f"--{STRENGTH}", "-1", "--eval.steps", "0"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [error.partition(" is ")[0] for error in errors] == [f"error: {STRENGTH}", "error: eval.steps"]
    assert "it must be greater than 0: change --algo.losses.toy.strength." in errors[0]
    assert main([*words, f"--{STRENGTH}", "2"]) == 2
    assert "actor.policy_loss_type is ppo: set --actor.policy_loss_type toy" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["nowhere.py", "x" * 5000])
def test_a_file_that_is_not_there_is_a_sentence_among_others(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "rl", *NEEDED, "--algo.extension_path", path, "--rollout.top_p", "2"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [error.partition(" is ")[0] for error in errors] == ["error: --algo.extension_path", "error: rollout.top_p"]


def test_without_the_file_the_flag_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "rl", *NEEDED, f"--{STRENGTH}", "2"]) == 2
    assert f"--{STRENGTH} is not a flag" in capsys.readouterr().err
    assert with_brought(RLConfig) is RLConfig


def test_another_value_does_not_continue_the_run(plugin: str) -> None:
    chosen = ["--algo.extension_path", plugin, "--actor.policy_loss_type", "toy"]
    told = [
        {"trainer": "rl", "settings": flat_settings(config), "versions": {}, "models": {}, "data": None}
        for config in (parsed(*chosen), parsed(*chosen, f"--{STRENGTH}", "2"), RLConfig())
    ]
    check_continues(told[0], told[0])
    with pytest.raises(Exception, match=rf"{STRENGTH} is 2\.0, but was 0\.5"):
        check_continues(told[0], told[1])
    told[2]["settings"]["actor.policy_loss_type"] = "toy"  # begun before the loss had settings
    told[2]["settings"]["algo.extension_path"] = plugin
    check_continues(told[2], told[0])


def test_the_settings_travel_to_processes_that_have_not_read_the_file(plugin: str, tmp_path: Path) -> None:
    config = parsed("--algo.extension_path", plugin, "--actor.policy_loss_type", "toy", f"--{STRENGTH}", "2")
    send_users_classes_whole(cloudpickle)
    (tmp_path / "config").write_bytes(cloudpickle.dumps(config))
    script = (
        "import pickle, sys\nconfig = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert config.algo.losses.toy.strength == 2.0 and config.train.seed == 42\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "config"], check=True, timeout=120)


def test_an_estimator_brings_settings_too(algorithms_as_before: None) -> None:
    @attrs.define(kw_only=True)
    class ScaleSettings:
        """How rewards are scaled."""

        scale: float = setting(2.0, "Factor of each reward.")

    @estimator("scaled", EstimatorTraits(whiten="none"), settings=ScaleSettings)
    def scaled(inputs: EstimatorInput, params: EstimatorParams, settings: ScaleSettings) -> Advantages:
        values_N = inputs.rewards_N * settings.scale
        return Advantages(advantages_N=values_N, returns_N=values_N)

    run = with_brought(RLConfig)()
    assert "algo.estimators.scaled.scale" in list(setting_names(type(run)))
    batch = batch_of(3, "token_mean")
    inputs = EstimatorInput(
        rewards_N=batch.rewards_N,
        token_rewards_N=torch.zeros_like(batch.rewards_N),
        action_mask_N=batch.action_mask_N,
        lengths_S=batch.lengths_S,
        group_ids_S=batch.group_ids_S,
        sample_ids_S=batch.sample_ids_S,
    )
    found = [
        estimate("scaled", inputs, EstimatorParams(), settings=own).advantages_N
        for own in (None, ScaleSettings(scale=6.0))
    ]
    torch.testing.assert_close(found[1], 3 * found[0])
    assert found[0].abs().sum() > 0


def test_a_catalogue_entry_brings_the_settings_of_a_built_in_loss(algorithms_as_before: None) -> None:
    """Two places: the entry, which help and checks read without torch, and the function."""

    @attrs.define(kw_only=True)
    class GateSettings:
        """The gate."""

        slope: float = setting(1.0, "Slope of the gate.")

    catalogue.POLICY_LOSSES["gate"] = catalogue.PolicyLossTraits(settings=GateSettings)
    assert "algo.losses.gate.slope" in list(setting_names(with_brought(RLConfig)))

    @policy_loss("gate")
    def gate(inputs: PolicyLossInput, params: PolicyLossParams, settings: GateSettings) -> PolicyLoss:
        loss_N = settings.slope * inputs.logprobs_N
        never_N = torch.zeros_like(inputs.action_mask_N)
        return PolicyLoss(loss_N=loss_N, ratio_N=loss_N.detach(), clipped_low_N=never_N, clipped_high_N=never_N)

    chosen = ["--actor.policy_loss_type", "gate"]
    torch.testing.assert_close(
        gradient(parsed(*chosen, "--algo.losses.gate.slope", "3")), 3 * gradient(parsed(*chosen))
    )


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("my-loss", "x: float = setting(1.0, 'A factor.')", "use letters, digits and _"),
        ("mine", "x: float = 1.0", "x is no setting: make its field by setting"),
    ],
)
def test_what_is_no_section_is_refused_by_name(
    name: str, body: str, message: str, tmp_path: Path, algorithms_as_before: None
) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from attrs import define\nfrom rollgrad import policy_loss, setting\n"
        f"@define\nclass Own:\n    {body}\n"
        f"@policy_loss({name!r}, settings=Own)\ndef f(inputs, params, settings): ...\n",
        encoding="utf-8",
    )
    *_, (error,) = parse_run(TrainArguments, RLConfig, "train rl", ["--algo.extension_path", str(path)])
    assert isinstance(error, ConfigurationError)
    assert message in str(error)


def test_settings_that_nothing_has_brought_say_how_they_come(plugin: str, tmp_path: Path) -> None:
    config = RLConfig()
    with pytest.raises(AttributeError, match="Nothing has brought settings called 'toy': import the module"):
        config.algo.losses.toy.strength = 2.0
    assert not hasattr(config.algo.losses, "toy")
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"algo": {"extension_path": plugin}}))
    loaded = load_config(file)
    loaded.algo.losses.toy.strength = 2.0
    assert flat_settings(loaded)[STRENGTH] == 2.0
