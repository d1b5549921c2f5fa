"""Bad input: ten thousand at a real daemon, whatever Hypothesis finds at its decoders; `make fuzz` sends a million."""

from __future__ import annotations

import contextlib
import math
import random
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotuned.service.requests import parse_request
from cotuned.wire import decode_batch, decode_control
from cotuned.wire.errors import FrameError, InvalidRequest
from tests.fuzz.inputs import ODD, REQUESTS, Input, Inputs
from tests.fuzz.target import SETTINGS, Target, run, wait_for_drain


@pytest.mark.slow
def test_ten_thousand_inputs(start_daemon: Any) -> None:
    daemon = start_daemon(**SETTINGS)
    target = Target(daemon)
    run(target, Inputs(1), 10_000, 2_500, random.Random(1))
    wait_for_drain(target)
    target.check()
    target.close()
    assert sum(target.sent.values()) >= 10_000
    assert {"bad_frame", "invalid_request", "protocol_mismatch"} <= set(target.refused)
    assert daemon.terminate() == 0


def test_the_same_seed_sends_the_same() -> None:
    first, second = Inputs(7), Inputs(7)
    assert [first.next() for _ in range(500)] == [second.next() for _ in range(500)]


def test_the_guarded_run_is_never_named() -> None:
    supply = Inputs(3)
    assert not any(b"guarded" in frame for _ in range(5_000) for frame in supply.next().frames)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5), max_leaves=20
)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(REQUESTS), st.dictionaries(st.sampled_from(sorted({k for r in REQUESTS for k in r})), values))
def test_a_request_of_any_values_is_one_or_is_refused_by_name(request: dict[str, Any], odd: dict[str, Any]) -> None:
    message = {**request, **odd}
    said = ""
    try:
        parse_request(message)
    except InvalidRequest as error:
        said = str(error)
    assert not said or any(name in said for name in message)


@settings(max_examples=500, deadline=None)
@given(values | st.lists(values, min_size=8, max_size=8))
def test_decoders_raise_frame_errors_only(content: Any) -> None:
    try:
        frame = msgpack.packb(content)
    except (OverflowError, ValueError):
        return
    for decode in (decode_batch, decode_control):
        with contextlib.suppress(FrameError):
            decode(frame)


@pytest.mark.parametrize("value", [v for v in ODD if isinstance(v, float)])
@pytest.mark.parametrize(
    ("request_", "field"),
    [(r, f) for r in REQUESTS for f, v in r.items() if isinstance(v, float)],
    ids=lambda x: x if isinstance(x, str) else x["op"],
)
def test_numbers_that_float32_cannot_carry_are_refused_by_name(
    request_: dict[str, Any], field: str, value: float
) -> None:
    carried = math.isfinite(value) and (value == 0 or abs(value) >= 2.0**-126)
    # That a policy entropy is at most ln K is checked where K is known.
    within = value >= 0 if field == "policy_entropy" else abs(value) <= 3.4028234663852886e38
    message = {**request_, field: value}
    if carried and within:
        parse_request(message)
    else:
        with pytest.raises(InvalidRequest, match=f"^{field}: got "):
            parse_request(message)


@pytest.mark.parametrize("depth", [500, 900, 1000, 1020])
def test_a_deeply_nested_value_does_not_end_the_daemon(start_daemon: Any, depth: int) -> None:
    """The text of the error was made whole before it was cut, and Python does not go that deep."""
    daemon = start_daemon(**SETTINGS)
    target = Target(daemon)
    deep = b"\x91" * depth + b"\x00"
    for name in ("op", "run", "step", "v", "id", "extra"):
        message = {"v": 1, "id": 1, "op": "cotune", "session": 1, "step": 1, name: None}
        frame = msgpack.packb(message).replace(msgpack.packb(name) + b"\xc0", msgpack.packb(name) + deep)
        target.send(Input("deep", "queries", [frame]))
    for place in range(8):
        fields = [msgpack.packb(field) for field in (1, 11, 1, 0, 0, b"\1", None, None)]
        fields[place] = deep
        target.send(Input("deep", "actions", [b"\x98" + b"".join(fields)]))
    for socket in ("actions", "queries"):
        target.send(Input("deep, and more behind it", socket, [deep + b"\x00"]))
    wait_for_drain(target)
    target.check()
    target.close()
