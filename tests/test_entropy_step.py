"""`EntropyStep`: batches that lie on the device, beside `HostBus` and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cotuned.config.settings import Settings
from cotuned.kernels import Drain, HostBus, run_parameters
from cotuned.wire.errors import CapturingStream, InvalidActions
from cotuned.wire.slots import Counter, Slot
from tests.bus_contract import assert_agree, closed_entropy, same, why_no_cuda

pytestmark = pytest.mark.gpu
DTYPES = ["uint8", "int16", "int32", "int64"]


class Rig:
    """A `CudaBus` and a `HostBus` with one open row each, and a step into the first."""

    def __init__(self, k: int = 11, pool: int = 1, *, prefill: bool = False) -> None:
        if why_no_cuda():
            pytest.skip(f"CudaBus: {why_no_cuda()}")
        import cupy

        from cotuned.kernels.cuda_bus import CudaBus

        self.cupy: Any = cupy
        self.prefill = prefill
        settings = Settings(n_actions=k, observation={"pool_min_actions": pool})  # type: ignore[arg-type]
        self.cuda, self.host = CudaBus(settings), HostBus(settings)
        for bus in (self.cuda, self.host):
            bus.open_row(0, run_parameters(settings, ""))
        self.step = self.cuda.entropy_step(0, prefill=prefill)
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def launch(self, actions: Any) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()  # `actions` were made on another stream
        self.step.launch(self.stream, actions)
        self.stream.synchronize()

    def both(self, actions: np.ndarray[Any, Any], offset: int = 0) -> None:
        """The same batch into both buses; on the device `offset` items behind a boundary, poison around it."""
        poison = np.iinfo(actions.dtype).max
        padded = np.full(offset + actions.size + 40, poison, dtype=actions.dtype)
        padded[offset : offset + actions.size] = actions
        self.launch(self.cupy.asarray(padded)[offset : offset + actions.size])
        self.host.observe(Drain.of(0, [actions], prefill=self.prefill))

    def assert_agree(self) -> None:
        assert_agree(self.cuda.row(0), self.host.row(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [2, 11, 16, 17, 100, 300, 4096])
def test_any_length_and_start_agrees_with_the_host(k: int, dtype: str) -> None:
    rig = Rig(k)
    rng = np.random.default_rng(k)
    k = min(k, 256) if dtype == "uint8" else k
    for n in (1, 2, 15, 16, 17, 31, 33, 1000, 1024, 4097, 16_383, 16_384, 16_385, 123_457, 2**20 + 3):
        actions = np.minimum(rng.geometric(2 / k, n) - 1, k - 1).astype(dtype)
        for offset in (0, 1, 3):
            rig.both(actions, offset)
        rig.assert_agree()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [11, 16, 300])
def test_one_bad_index_anywhere_changes_only_the_rejections(k: int, dtype: str) -> None:
    rig = Rig(k)
    rng = np.random.default_rng(1)
    bad_ones = [bad for bad in (k, k + 1, 16, 31, 255, -1, 2**16, 2**32, -(2**40)) if not 0 <= bad < k]
    limits = np.iinfo(dtype)
    bad_ones = [bad for bad in bad_ones if limits.min <= bad <= limits.max]
    if not bad_ones:
        pytest.skip("this dtype cannot name a bad index")
    rig.both(rng.integers(0, min(k, 256), 1000).astype(dtype))
    before, rejected = rig.cuda.row(0), 0
    for n in (1, 33, 1024, 50_001):
        for place in {0, n // 2, n - 1}:
            for bad in bad_ones:
                actions = rng.integers(0, min(k, 256), n).astype(dtype)
                actions[place] = bad
                rig.both(actions, 1)
                rejected += 1
    after = rig.cuda.row(0)
    assert after.counters[Counter.BATCHES_REJECTED] == rejected
    after.counters[Counter.BATCHES_REJECTED] = 0
    assert same(before, after)
    rig.assert_agree()


@pytest.mark.parametrize("k", [2, 11, 16, 300])
def test_one_hot_is_exactly_zero_and_uniform_is_ln_k(k: int) -> None:
    rig = Rig(k)
    for n in (1, 3, 1000, 70_001):
        for action in (0, k // 2, k - 1):
            rig.launch(rig.cupy.full(n, action, dtype="int32"))
            assert rig.cuda.row(0).slots[Slot.ACTION_ENTROPY] == 0.0
    rig.launch(rig.cupy.asarray(np.tile(np.arange(k), 50).astype(np.int64)))
    measured = rig.cuda.row(0).slots[Slot.ACTION_ENTROPY]
    assert measured == np.float32(math.log(k))


@pytest.mark.parametrize("k", [11, 300])
@pytest.mark.parametrize("prefill", [False, True])
def test_pools_like_the_host_and_mixes_with_drains(k: int, prefill: bool) -> None:
    rig = Rig(k, 1024, prefill=prefill)
    rng = np.random.default_rng(3)
    for i in range(60):
        actions = rng.integers(0, k, int(rng.integers(0, 900))).astype(np.int32)
        if i % 3:
            rig.both(actions)
            continue
        proposed, told = rng.integers(0, k, actions.size), np.ones(1, dtype=np.bool_)
        drain = Drain(
            actions,
            np.array([actions.size]),
            np.zeros(1, np.int64),
            ~told,
            proposed,
            told,
            np.array([actions.size / 2]),
        )
        for bus in (rig.cuda, rig.host):
            assert bus.observe(drain) == []
        rig.assert_agree()
    assert rig.cuda.row(0).counters[Counter.OBSERVATIONS] > 10
    assert rig.cuda.row(0).counters[Counter.GATE_OBSERVATIONS] > 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_the_same_a_thousand_times_and_for_any_launch_shape(dtype: str) -> None:
    rows = []
    rng = np.random.default_rng(5)
    batches = [rng.integers(0, 11, n).astype(dtype) for n in (1000, 2**17 + 1)]
    for blocks, threads in ((0, 0), (1, 512), (3, 128), (131, 256), (264, 512)):
        rig = Rig()
        for batch in batches:
            on_device = rig.cupy.asarray(batch)
            rig.step.prepare(dtype)
            if blocks and batch.size > 16_384:
                size = on_device.itemsize
                shape = (rig.step._addresses["step_large", size], min(blocks, 2 * 132 if size < 8 else 132), threads)
                rig.step._shape = (batch.size, size, shape)
            rig.cupy.cuda.runtime.deviceSynchronize()
            for _ in range(1000):
                rig.step.launch(rig.stream, on_device)
        rig.stream.synchronize()
        rows.append(rig.cuda.row(0))
    assert all(same(row, rows[0]) for row in rows[1:])
    assert rows[0].counters[Counter.OBSERVATIONS] == 2000
    expected = closed_entropy(np.bincount(batches[1]).tolist())
    assert rows[0].slots[Slot.ACTION_ENTROPY] == pytest.approx(expected, abs=2e-7)


def test_more_than_two_to_the_31_actions() -> None:
    rig = Rig()
    n = 2**31 + 11 * 5 + 3
    actions = rig.cupy.empty(n, dtype=rig.cupy.uint8)
    for begin in range(0, n, 11 * 2**24):
        part = actions[begin : begin + 11 * 2**24]
        part[...] = rig.cupy.arange(part.size, dtype=rig.cupy.uint32) % 11
    rig.launch(actions[1:])
    row = rig.cuda.row(0)
    assert row.counters[Counter.ACTIONS_TRAIN] == n - 1
    assert row.slots[Slot.ACTION_ENTROPY] == pytest.approx(math.log(11), abs=1e-6)


def test_a_capturing_stream_is_refused_with_a_sentence() -> None:
    rig = Rig()
    actions = rig.cupy.zeros(64, dtype=rig.cupy.int32)
    rig.step.prepare("int32")
    rig.stream.begin_capture()
    with pytest.raises(CapturingStream, match=r"outside capture, after the last gate"):
        rig.step.launch(rig.stream, actions)
    rig.stream.end_capture()
    assert rig.cuda.row(0).counters[Counter.BATCHES_TRAIN] == 0
    rig.launch(actions)
    assert rig.cuda.row(0).counters[Counter.BATCHES_TRAIN] == 1


def test_takes_torch_tensors_and_dlpack() -> None:
    torch = pytest.importorskip("torch")
    rig = Rig()

    class OnlyDlpack:
        def __init__(self, array: Any) -> None:
            self._array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

    values = np.arange(1000) % 11
    rig.cupy.cuda.runtime.deviceSynchronize()
    rig.step.launch(torch.cuda.current_stream().cuda_stream, torch.as_tensor(values, device="cuda"))
    torch.cuda.synchronize()
    rig.launch(torch.as_tensor(values.reshape(10, 100), device="cuda", dtype=torch.uint8))
    rig.launch(OnlyDlpack(rig.cupy.asarray(values)))
    assert rig.cuda.row(0).counters[Counter.ACTIONS_TRAIN] == 3000
    with pytest.raises(InvalidActions, match="strides"):
        rig.launch(torch.as_tensor(values, device="cuda")[::2])


def test_says_what_it_cannot_take() -> None:
    rig = Rig(300)
    with pytest.raises(InvalidActions, match="strides"):
        rig.launch(rig.cupy.zeros((4, 4), dtype="int32").T)
    with pytest.raises(InvalidActions, match="float32"):
        rig.launch(rig.cupy.zeros(4, dtype="float32"))
    with pytest.raises(InvalidActions, match="int8 cannot"):
        rig.launch(rig.cupy.zeros(4, dtype="int8"))
    with pytest.raises(InvalidActions, match="list.*GPU"):
        rig.launch([1, 2])
    with pytest.raises(InvalidActions, match="host memory"):
        rig.launch(np.zeros(4, dtype=np.int32))
    rig.launch(rig.cupy.zeros(0, dtype="int32"))
    assert not rig.cuda.row(0).counters.any()
