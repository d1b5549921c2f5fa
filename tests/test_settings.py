"""Settings: precedence, and a sentence for each fault."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from cotuned.config import Settings, add_flags, load
from cotuned.wire.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("COTUNED_"):
            monkeypatch.delenv(name)


def written(folder: Path, settings: Any) -> Path:
    file = folder / "settings.yaml"
    file.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
    return file


def flags(*arguments: str) -> Any:
    parser = argparse.ArgumentParser()
    source = add_flags(parser)
    return source, parser.parse_args(arguments)


def test_each_source_overrides_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, {"tuner": {"lr_tau": 0.1, "lr_alpha": 0.1, "tau_max": 9}, "n_actions": 5})
    monkeypatch.setenv("COTUNED_TUNER__LR_TAU", "0.2")
    monkeypatch.setenv("COTUNED_TUNER__LR_ALPHA", "0.2")
    settings = load(file, flags("--tuner.lr_tau", "0.3"))
    assert (settings.tuner.lr_tau, settings.tuner.lr_alpha, settings.tuner.tau_max) == (0.3, 0.2, 9)
    assert settings.n_actions == 5


@pytest.mark.parametrize("off", [{"directory": None}, {"directory": ""}])
def test_state_may_be_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: dict[str, Any]) -> None:
    assert load().state.directory == "cotuned-state"
    assert load(written(tmp_path, {"state": off})).state.directory is None
    assert load(flags=flags("--state.directory", "")).state.directory is None
    monkeypatch.setenv("COTUNED_STATE__DIRECTORY", "")
    assert load().state.directory is None


def test_the_environment_may_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTUNED_CONFIG", str(written(tmp_path, {"n_actions": 7})))
    assert load().n_actions == 7


def test_runs_lie_over_the_tuner(tmp_path: Path) -> None:
    file = written(
        tmp_path, {"tuner": {"lr_tau": 0.5, "target_entropy": 2.0}, "runs": {"a": {"target_ratio": 0.5}, "b": None}}
    )
    settings = load(file)
    assert settings.tuner_of("a").lr_tau == 0.5
    assert settings.tuner_of("a").target(11) == pytest.approx(0.5 * math.log(11))
    assert settings.tuner_of("b").target(11) == settings.tuner_of("other").target(11) == 2.0


def test_a_later_source_may_say_the_target_the_other_way(tmp_path: Path) -> None:
    file = written(tmp_path, {"tuner": {"target_ratio": 0.5}})
    assert load(file, flags("--tuner.target_entropy", "1.25")).tuner.target(11) == 1.25


def test_the_default_target_is_a_share_of_ln_k() -> None:
    assert Settings.model_validate({"n_actions": 4}).tuner.target(4) == pytest.approx(0.98 * math.log(4))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"n_action": 5}, "n_action: there is no such setting (file {file}); did you mean n_actions?"),
        ({"tuner": {"lr_tua": 5}}, "tuner.lr_tua: there is no such setting (file {file}); did you mean tuner.lr_tau?"),
        ({"runs": {"a": {"sourc": "policy"}}}, "did you mean runs.a.source?"),
        ({"observation": {"ema_blend": 0.39}}, "observation.ema_blend: got 0.39 (file {file}); allowed: at least 0.4"),
        ({"observation": {"ema_blend": 1.1}}, "observation.ema_blend: got 1.1 (file {file}); allowed: at most 1"),
        ({"observation": {"ema_blend": ".nan"}}, "observation.ema_blend: got '.nan'"),
        ({"tuner": {"target_entropy": -1}}, "tuner.target_entropy: got -1 nats, allowed is [0, ln K] = [0, 2.3979]"),
        ({"n_actions": 4, "tuner": {"target_entropy": 1.4}}, "allowed is [0, ln K] = [0, 1.3863]"),
        ({"runs": {"a": {"target_entropy": 5}}}, "runs.a.target_entropy: got 5 nats"),
        ({"tuner": {"target_entropy": float("nan")}}, "tuner.target_entropy: got nan"),
        ({"tuner": {"target_entropy": 1, "target_ratio": 0.5}}, "got both (1 nats and 0.5); give one of them"),
        ({"tuner": {"alpha_min": 1, "alpha_max": 0.5}}, "expected 1e-6 ≤ min ≤ initial ≤ max"),
        ({"tuner": {"tau_max": float("inf")}}, "tuner.tau_max: got inf"),
        ({"n_actions": 1}, "n_actions: got 1 (file {file}); allowed: at least 2"),
        ({"n_actions": 4097}, "n_actions: got 4097 (file {file}); allowed: at most 4096"),
        ({"n_actions": 2.5}, "n_actions: got 2.5 (file {file}); allowed: an integer"),
        ({"device": "gpu"}, "device: got 'gpu' (file {file}); allowed: 'auto', 'cuda' or 'cpu'"),
        ({"bus": {"slot_names": {"loss": 583}}}, "bus.slot_names.loss: got 583"),
        ({"bus": {"slot_names": {"ALPHA": 3}}}, "bus.slot_names.ALPHA: the name is taken"),
        ({"bus": {"n_slots": 600}}, "bus.n_slots: got 600 (file {file}); allowed: at least 640"),
        ({"endpoints": {"queries": "5584"}}, "endpoints.queries: got '5584', expected tcp://HOST:PORT"),
        ({"endpoints": {"queries": "tcp://127.0.0.1:5583"}}, "expected three different endpoints"),
        ({"endpoints": {"queries": "tcp://0.0.0.0:5584"}}, "endpoints: got tcp://0.0.0.0:5584, which others"),
        ({"endpoints": {"queries": "ipc:///" + "x" * 120}}, "at most 107 bytes"),
        ({"runs": {"a b": {}}}, "run name 'a b' cannot be used"),
        ({"runs": {f"r{i}": {} for i in range(17)}}, "bus.max_runs allows 16"),
        ({"tuner": {"lr_alpha": True}}, "tuner.lr_alpha: got true, expected a number"),
        ({"n_actions": True}, "n_actions: got true, expected a number"),
        ({"state": {"directory": True}}, "state.directory: got true, expected text"),
        ({"state": {"interval": 0}}, "state.interval: got 0 (file {file}); allowed: above 0"),
        ({"state": {"synchronous": "off"}}, "state.synchronous: got 'off' (file {file}); allowed: 'normal' or 'full'"),
        ({"record": 5}, "record: got 5 (file {file}); allowed: text"),
        ("[" * 5000, "is not YAML"),
        ({"limits": 3}, "limits: got 3 (file {file}); allowed: keys and values"),
        ("n_actions: 3\nn_actions: 4\n", "found the key 'n_actions' twice"),
        ("- 1", "holds a list, expected keys and values"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_fault_is_named_with_path_value_and_what_is_allowed(tmp_path: Path, settings: Any, says: str) -> None:
    file = written(tmp_path, settings)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert says.format(file=file) in str(caught.value)


def test_all_faults_are_said_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, {"n_actions": 1, "tuner": {"lr_tau": -1}, "runs": {"a": {"source": "policy"}}})
    with pytest.raises(ConfigError, match="2 faults in the settings") as caught:
        load(file)
    assert "runs.a" not in str(caught.value)  # what a run only inherits is said once


def test_the_source_of_a_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTUNED_OBSERVATION__EMA_BLEND", "0.1")
    with pytest.raises(
        ConfigError,
        match=r"0.1'? \(environment, COTUNED_OBSERVATION__EMA_BLEND\); allowed",
    ):
        load()
    with pytest.raises(ConfigError, match=r"tuner.lr_tau: got 'x' \(command line\); allowed: a number"):
        load(flags=flags("--tuner.lr_tau", "x"), environment=False)


def test_a_typo_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTUNED_TUNR__LR_TAU", "0.1")
    with pytest.raises(ConfigError, match="COTUNED_TUNR__LR_TAU: there is no setting 'tunr'"):
        load()


def test_what_kubernetes_sets_beside_a_service_is_no_typo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTUNED_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("COTUNED_PORT_5584_TCP", "tcp://10.0.0.1:5584")
    monkeypatch.setenv("COTUNED_PORT", "tcp://10.0.0.1:5584")
    assert load() == Settings.model_validate({})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the settings file"):
        load(tmp_path / "none.yaml")


def test_other_addresses_need_insecure(tmp_path: Path) -> None:
    file = written(tmp_path, {"endpoints": {"queries": "tcp://0.0.0.0:5584"}, "insecure": True})
    assert load(file).insecure


@pytest.mark.parametrize("section", [Settings, *(f.annotation for f in Settings.model_fields.values())])
def test_every_setting_has_its_line(section: Any) -> None:
    for name, field in getattr(section, "model_fields", {}).items():
        if name not in ("lr_alpha", "n_actions"):
            assert field.description, name


def test_an_inherited_fault_is_said_once_whatever_the_run_is_called(tmp_path: Path) -> None:
    file = written(tmp_path, {"tuner": {"lr_tau": -1}, "runs": {"lr.1": {"source": "policy"}, "b": {"lr_tau": -2}}})
    with pytest.raises(ConfigError, match="2 faults in the settings") as caught:
        load(file)
    assert "tuner.lr_tau: got -1" in str(caught.value)
    assert "runs.b.lr_tau: got -2" in str(caught.value)
