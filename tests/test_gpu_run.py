"""`make test-gpu`, as far as it can be looked at without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "gpu_run.sh"
FAMILIES = {"drain", "entropy_step", "entropy_step_wide", "sac_cotune", "q_pi_distill_grad"}


def test_a_renamed_test_does_not_fall_out_of_what_compute_sanitizer_looks_at() -> None:
    """Each word of each expression is in the name of a GPU test of that file."""
    parts = [line.split("|") for line in subprocess.check_output([SCRIPT, "--parts"], text=True).splitlines()]
    assert {family for family, _, _ in parts} == FAMILIES
    files = {file for _, file, _ in parts}
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=", "-q", "-m", "gpu", *files]
    collected = subprocess.run(collect, capture_output=True, text=True, cwd=ROOT, check=True).stdout.splitlines()
    for family, file, expression in parts:
        words = set(expression.replace("(", " ").replace(")", " ").split()) - {"and", "or"}
        for word in words:
            assert any(name.startswith(file) and word in name for name in collected), f"{family}: {word}"


def test_without_a_gpu_it_fails_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('no CuPy here')")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([SCRIPT, tmp_path / "logs"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ran.returncode == 1
    assert "finds no GPU" in ran.stderr
