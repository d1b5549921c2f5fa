"""Drains taken as a whole end as those taken batch by batch: the same rows, streams and rejections, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from cotuned.config.settings import Settings
from cotuned.kernels import HostBus, Rejection
from cotuned.service.changes import Changes
from cotuned.service.runs import Runs
from cotuned.service.staging import Staging
from cotuned.service.streams import Stream, Streams, Verdict
from cotuned.service.whole_drain import take_whole
from cotuned.wire import Batch, action_dtype, decode_batch, encode_batch
from cotuned.wire.messages import Hello

RUNS = ("a", "b", "c")


@dataclass
class Side:
    """A bus with streams 1 to 6, two for each run."""

    settings: Settings

    def __post_init__(self) -> None:
        self.bus = HostBus(self.settings)
        changes = Changes()
        runs = Runs(self.settings, self.bus, changes)
        self.streams = Streams(10, 60.0, changes, keeps_state=False)
        self.opened: list[Stream] = []
        for number in range(1, 7):
            run = runs.find_or_open(RUNS[number % 3])
            hello = Hello(run=run.name, actor=f"actor-{number}", stream=number, base=0)
            self.opened.append(self.streams.open(hello, run)[0])
        self.dtype = action_dtype(self.settings.n_actions)
        self.rejected: list[tuple[int, int, Rejection]] = []

    def whole(self, frames: list[bytes]) -> bool:
        taken = take_whole(frames, self.streams, self.dtype)
        if taken is None:
            return False
        for rejection in self.bus.observe(taken.drain):
            stream, sequence = taken.batch(rejection.batch)
            self.rejected.append((stream.number, sequence, rejection))
        return True

    def one_by_one(self, frames: list[bytes]) -> None:
        staging = Staging(self.settings.n_actions)
        for frame in frames:
            batch = decode_batch(frame, self.dtype.itemsize)
            assert isinstance(batch, Batch)
            stream = self.streams.get(batch.stream)
            if stream is not None and stream.judge(batch.sequence) is Verdict.TAKE:
                staging.add(stream, batch)
        if len(staging):
            drain, staged = staging.take()
            for rejection in self.bus.observe(drain):
                stream, batch = staged[rejection.batch]
                self.rejected.append((stream.number, batch.sequence, rejection))

    def state(self) -> list[object]:
        rows = [self.bus.row(row) for row in range(len(RUNS))]
        return [
            [(row.slots.tobytes(), row.counters.tolist(), row.pool.tolist()) for row in rows],
            [(stream.number, stream.last, stream.gap) for stream in self.opened],
            self.rejected,
        ]


def frames_of(rng: np.random.Generator, last: dict[int, int], n: int, n_actions: int) -> Iterator[bytes]:
    """The next batches of random streams; a few hold an action or a row entropy that is out of range."""
    dtype = action_dtype(n_actions)
    for _ in range(n):
        stream = int(rng.choice(list(last)))
        last[stream] += 1
        size = int(rng.choice([16, 64, 300]))
        bad = rng.random() < 0.02
        executed = rng.integers(0, n_actions + bad, size).astype(dtype)
        proposed = None if rng.random() < 0.5 else rng.integers(0, n_actions, size).astype(dtype).tobytes()
        entropy = None if rng.random() < 0.5 else float(rng.uniform(0, (1 + bad) * np.log(n_actions)) * size)
        yield encode_batch(
            Batch(stream, last[stream], int(rng.random() < 0.1), 200, executed.tobytes(), proposed, entropy)
        )


@pytest.mark.parametrize("n_actions", [11, 16, 40, 300])
@pytest.mark.parametrize("streams", [[1], [1, 4], [1, 2, 3, 4, 5, 6]])
def test_whole_drains_and_single_batches_end_alike(n_actions: int, streams: list[int]) -> None:
    settings = Settings(n_actions=n_actions)
    together, single = Side(settings), Side(settings)
    rng = np.random.default_rng(n_actions + len(streams))
    last = dict.fromkeys(streams, 0)
    for _ in range(10):
        frames = list(frames_of(rng, last, 600, n_actions))
        assert together.whole(frames)
        single.one_by_one(frames)
        assert together.state() == single.state()
    assert together.rejected
    assert together.bus.row(0).counters.any()


def ordinary(n: int = 64) -> list[bytes]:
    return [encode_batch(Batch(1, number, 0, 0, bytes([number % 11] * 64))) for number in range(1, 1 + n)]


@pytest.mark.parametrize("odd", ["duplicate", "gap", "swapped", "unknown stream", "begins late", "malformed", "owned"])
def test_what_is_out_of_the_ordinary_takes_nothing(odd: str) -> None:
    side = Side(Settings())
    frames = ordinary()
    match odd:
        case "duplicate":
            frames[30] = frames[29]
        case "gap":
            del frames[30]
        case "swapped":
            frames[30], frames[31] = frames[31], frames[30]
        case "unknown stream":
            frames[30] = encode_batch(Batch(77, 1, 0, 0, bytes(64)))
        case "begins late":
            del frames[0]
        case "malformed":
            frames[30] = b"\x00" + frames[30][1:]
        case _:
            side.opened[0].owner = "somebody"
    before = side.state()
    assert not side.whole(frames)
    assert side.state() == before


def test_a_whole_drain_ends_a_gap() -> None:
    side = Side(Settings())
    side.one_by_one(ordinary()[1:2])
    assert side.opened[0].gap
    assert side.whole(ordinary())
    assert not side.opened[0].gap
    assert side.opened[0].last == 64
