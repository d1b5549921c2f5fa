"""Every ``.cu`` file compiles, with the options that CuPy uses, for the GPUs that we support. Needs no GPU."""

from __future__ import annotations

import ctypes
import re
import site
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from cotuned.kernels import cuda_distill
from cotuned.kernels.cuda_distill import Variant
from cotuned.kernels.cuda_sources import COMPILE_OPTIONS, RecordLayout, defines, source

SOURCES = ("action_entropy", "entropy_step", "entropy_step_wide", "sac_cotune")
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
ACTION_COUNTS = {
    "action_entropy": (2, 11, 256, 257, 4096),
    "entropy_step": (2, 11, 16),
    "entropy_step_wide": (17, 4096),
    "sac_cotune": (11, 4096),
}
ACTION_BYTES = {"entropy_step": (1, 2, 4, 8), "entropy_step_wide": (1, 2, 4, 8)}
CASES = [(name, k, size) for name in SOURCES for k in ACTION_COUNTS[name] for size in ACTION_BYTES.get(name, (0,))]
DISTILL_CASES = [
    Variant(k, logits, q, gradient, vector, masked, dense=masked)
    for k, logits, q, gradient, vector in (
        (1, "float32", "float32", "float32", 1),
        (11, "float32", "float32", "float32", 1),
        (18, "bfloat16", "bfloat16", "bfloat16", 2),
        (64, "bfloat16", "bfloat16", "float32", 8),
        (300, "float16", "float32", "float16", 4),
        (1024, "float32", "bfloat16", "float32", 4),
        (4095, "float16", "float16", "float16", 1),
        (4096, "float32", "float32", "float32", 4),
    )
    for masked in (False, True)
]
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
ENTRIES = {
    "action_entropy": {"count_pieces", "merge_segments", "finish_runs", "observe_piece"},
    "entropy_step": {"step_tiny", "step_small", "step_large"},
    "entropy_step_wide": {"observe_batch", "count_blocks", "merge_blocks", "finish_batch"},
    "sac_cotune": {"sac_cotune"},
}


def find_nvrtc() -> Path | None:
    """The NVRTC library of an ``nvidia-cuda-nvrtc`` wheel."""
    for folder in [*site.getsitepackages(), site.getusersitepackages(), *sys.path]:
        for library in sorted(Path(folder, "nvidia").glob("*/lib/libnvrtc.so.*")):
            return library
    return None


class Nvrtc:
    """The few calls of NVRTC that compile a text."""

    def __init__(self, library: Path) -> None:
        for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(library))

    def architectures(self) -> list[int]:
        n = ctypes.c_int()
        assert self._library.nvrtcGetNumSupportedArchs(ctypes.byref(n)) == 0
        known = (ctypes.c_int * n.value)()
        assert self._library.nvrtcGetSupportedArchs(known) == 0
        return list(known)

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> bytes:
        """The machine code; on a fault the compiler's log becomes the assertion's message."""
        program = ctypes.c_void_p()
        create = self._library.nvrtcCreateProgram
        assert create(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None) == 0
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self._library.nvrtcCompileProgram(program, len(options), given)
        log = self._text(program, "ProgramLog").decode(errors="replace").strip("\0\n ")
        assert status == 0, log
        assert not log, log  # warnings too
        code = self._text(program, "CUBIN")
        self._library.nvrtcDestroyProgram(ctypes.byref(program))
        return code

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        text = ctypes.create_string_buffer(size.value)
        assert getattr(self._library, f"nvrtcGet{what}")(program, text) == 0
        return text.raw


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    library = find_nvrtc()
    if library is None:
        pytest.skip("no NVRTC: install nvidia-cuda-nvrtc-cu12")
    return Nvrtc(library)


@pytest.mark.parametrize(("name", "n_actions", "action_bytes"), CASES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(nvrtc: Nvrtc, name: str, architecture: int, n_actions: int, action_bytes: int) -> None:
    if architecture not in nvrtc.architectures():
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    options = (*COMPILE_OPTIONS, *CUPY_OPTIONS, f"-arch=sm_{architecture}")
    code = nvrtc.compile(source(name, n_actions, 1024, action_bytes), name, options)
    assert code.startswith(b"\x7fELF")
    assert all(entry.encode() in code for entry in ENTRIES[name])


@pytest.mark.parametrize("variant", DISTILL_CASES, ids=lambda v: f"{v.n_actions}-{v.logits}-{v.masked}")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_distill_compiles(nvrtc: Nvrtc, variant: Variant, architecture: int) -> None:
    if architecture not in nvrtc.architectures():
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    options = (*cuda_distill.COMPILE_OPTIONS, *CUPY_OPTIONS, f"-arch=sm_{architecture}")
    code = nvrtc.compile(variant.source(), "q_pi_distill_grad", options)
    assert code.startswith(b"\x7fELF")
    assert b"q_pi_distill_grad" in code


def test_all_sources_are_listed() -> None:
    folder = files("cotuned.kernels")
    found = {entry.name.removesuffix(".cu") for entry in folder.iterdir() if entry.name.endswith(".cu")}
    assert found == {*SOURCES, "q_pi_distill_grad"}


@pytest.mark.parametrize("name", [*SOURCES, "q_pi_distill_grad"])
def test_has_no_headers_and_no_atomics(name: str) -> None:
    text = DISTILL_CASES[0].source() if name == "q_pi_distill_grad" else source(name, 11, 1024)
    assert "#include" not in text
    assert "atomic" not in text.lower().replace("no atomics", "")
    assert not re.search(r"\bu?int(8|16|32|64)_t\b", text)


def test_constants_are_those_of_the_slot_table() -> None:
    constants = defines(11, 1024)
    assert constants["SLOT_RL_ACTION_ENTROPY_EMA_INDEX"] == 583
    assert constants["SLOT_RL_POLICY_ENTROPY_EMA_INDEX"] == 420
    assert constants["action_t"] == "unsigned char"
    assert defines(257, 1024)["action_t"] == "unsigned short"


@pytest.mark.parametrize("n_slots", [640, 641, 1023, 1024])
@pytest.mark.parametrize("n_actions", [2, 11, 4096])
def test_records_do_not_overlap_and_are_aligned(n_actions: int, n_slots: int) -> None:
    layout = RecordLayout.of(n_slots, n_actions)
    assert 4 * n_slots <= layout.counters
    assert layout.counters + 8 * 11 == layout.pool
    assert layout.pool + 8 * (n_actions + 5) == layout.parameters
    assert layout.parameters + 8 * 15 <= layout.size
    assert layout.counters % 8 == 0
    assert layout.size % 256 == 0
