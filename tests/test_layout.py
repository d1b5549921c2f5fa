"""The house's rules: imports run one way, the client stays light, the public surface is what it says."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "wire": set[str](),
    "config": {"wire"},
    "kernels": {"wire", "config"},
    "service": {"wire", "config", "kernels"},
    "client": {"wire"},
}
CLIENT_NEEDS = {"numpy", "zmq", "msgpack"}


def relative_imports(file: Path) -> set[str]:
    tree = ast.parse(file.read_text("utf-8"))
    return {
        node.module.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module
    }


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_one_way(package: str) -> None:
    for file in (ROOT / package).glob("*.py"):
        extra = relative_imports(file) - ALLOWED[package]
        assert not extra, f"{file} imports {extra}"


def test_the_client_loads_numpy_zmq_and_msgpack_only() -> None:
    script = (
        "import sys; before = set(sys.modules); import cotuned.client; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", _with_site(script)], capture_output=True, text=True, check=True
    )
    outside = {
        name for name in loaded.stdout.split() if name not in sys.stdlib_module_names and not name.startswith("_")
    }
    assert outside - {"cotuned", "cython_runtime"} <= CLIENT_NEEDS


def _with_site(script: str) -> str:
    # Without -S site hooks of other packages (coverage, editable installs) would be counted as the client's.
    return "import site; site.main(); " + script


@pytest.mark.parametrize("package", ["client", "wire", "config", "kernels", "service"])
def test_exported_members_are_what_is_there(package: str) -> None:
    module = importlib.import_module(f"cotuned.{package}")
    assert module.__all__ == sorted(module.__all__, key=_ruff_order)
    for name in module.__all__:
        assert getattr(module, name).__doc__ or name.isupper(), name


def _ruff_order(name: str) -> tuple[int, str]:
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name)


def test_kernels_are_package_data() -> None:
    from importlib.resources import files

    names = {entry.name for entry in files("cotuned.kernels").iterdir()}
    assert {"action_entropy.cu", "sac_cotune.cu"} <= names
