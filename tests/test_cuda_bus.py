"""`CudaBus` beside `HostBus`: the same random runs, and what only a device can get wrong."""

from __future__ import annotations

import numpy as np
import pytest

from cotuned.config.settings import Settings
from cotuned.kernels import Drain, IsvBus, cuda_bus, run_parameters
from cotuned.wire.errors import DeviceUnavailable
from cotuned.wire.slots import Counter
from tests.bus_contract import assert_agree, new_bus, same, why_no_cuda

RUNS = 8
gpu = pytest.mark.gpu


def random_drain(rng: np.random.Generator, k: int, longest: int) -> Drain:
    """Batches of several runs with proposals, row entropies and faults here and there."""
    n = int(rng.integers(1, 25))
    lengths = rng.integers(0, longest, n) * (rng.random(n) < 0.95)
    weights = rng.dirichlet(np.full(k, 0.3))
    proposed = rng.choice(k, int(lengths.sum()), p=weights)
    actions = np.where(rng.random(proposed.size) < 0.3, k // 2, proposed)
    if actions.size and rng.random() < 0.1:
        actions[rng.integers(0, actions.size)] = rng.choice([k, -1, 2**40])
    entropy = np.where(rng.random(n) < 0.5, rng.random(n) * lengths * np.log(k), np.nan)
    rows = rng.permutation(RUNS)[np.sort(rng.integers(0, RUNS, n))]
    told = rng.random(n) < 0.6
    return Drain(actions, lengths, rows, rng.random(n) < 0.3, proposed, told, entropy)


def both(k: int, pool: int, blend: float = 0.4) -> tuple[IsvBus, IsvBus]:
    settings = Settings(n_actions=k, observation={"pool_min_actions": pool, "ema_blend": blend})  # type: ignore[arg-type]
    buses = new_bus("cuda", settings), new_bus("host", settings)
    for bus in buses:
        for row in range(RUNS):
            bus.open_row(row, run_parameters(settings, f"run{row}"))
    return buses


@gpu
@pytest.mark.parametrize(("k", "pool", "longest"), [(11, 1024, 700), (11, 1, 100), (2, 64, 300), (300, 1024, 3000)])
def test_random_runs_of_1000_observations_agree_with_the_host(k: int, pool: int, longest: int) -> None:
    cuda, host = both(k, pool)
    rng = np.random.default_rng(k + pool)
    observations = steps = 0
    while observations < 1000:
        drain = random_drain(rng, k, longest)
        assert cuda.observe(drain) == host.observe(drain)
        row = int(rng.integers(0, RUNS))
        told = float(rng.uniform(0, np.log(k))) if rng.random() < 0.5 else None
        assert_agree(cuda.cotune(row, told), host.cotune(row, told))
        steps += 1
        if steps % 10 == 0:
            states = [cuda.row(row) for row in range(RUNS)]
            observations = sum(int(state.counters[Counter.OBSERVATIONS]) for state in states)
    for row in range(RUNS):
        assert_agree(cuda.row(row), host.row(row))


@gpu
@pytest.mark.parametrize("k", [11, 64, 300, 4096])
def test_large_batches_agree_with_the_host(k: int) -> None:
    cuda, host = both(k, 1024)
    rng = np.random.default_rng(k)
    for n in (2**20, 2**20 + 7, 123_457):
        actions = np.minimum(rng.geometric(2 / k, n) - 1, k - 1)
        lengths = np.array([5, n - 5 - 1001, 1001])
        drain = Drain(actions, lengths, np.array([0, 0, 3]), np.zeros(3, np.bool_), actions[::-1], np.ones(3, np.bool_))
        assert cuda.observe(drain) == host.observe(drain) == []
    for row in (0, 3):
        assert_agree(cuda.row(row), host.row(row))


@gpu
@pytest.mark.parametrize("k", [11, 300])
def test_bits_depend_on_neither_run_nor_launch_shape(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for smallest, part_actions, part_counts in ((4096, 2**24, 2**23),) * 5 + (
        (16, 2**24, 2**23),
        (61440, 2**24, 2**23),
        (4096, 5000, 2**23),
        (4096, 2**24, 4 * (k + 1)),
    ):
        monkeypatch.setattr(cuda_bus, "MIN_PIECE_ACTIONS", smallest)
        monkeypatch.setattr(cuda_bus, "PART_ACTIONS", part_actions)
        monkeypatch.setattr(cuda_bus, "PART_COUNTS", part_counts)
        cuda, _ = both(k, 1024)
        rng = np.random.default_rng(9)
        for longest in (100, 5000, 20_000):
            cuda.observe(random_drain(rng, k, longest))
        rows.append([cuda.row(row) for row in range(RUNS)])
        cuda.close()
    for other in rows[1:]:
        assert all(same(mine, first) for mine, first in zip(other, rows[0], strict=True))


@gpu
def test_says_what_it_lives_on() -> None:
    cuda, _ = both(11, 1024)
    assert cuda.device.startswith("cuda:0 (")
    assert "CuPy" in cuda.device
    cuda.close()


def test_without_a_device_the_error_says_what_to_do() -> None:
    if not why_no_cuda():
        pytest.skip("there is a CUDA device")
    with pytest.raises(DeviceUnavailable, match=r"got .*cotuned\[cuda13\].*device: cpu"):
        cuda_bus.CudaBus(Settings())
