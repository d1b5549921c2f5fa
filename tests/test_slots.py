"""The slot table: fixed numbers, one owner, a meaning for each."""

from __future__ import annotations

import pytest

from cotuned.wire import Counter, Slot
from cotuned.wire.slots import SOURCE_SLOTS, is_owned, slot_defines


def test_the_originating_numbers_stand() -> None:
    assert Slot.RL_POLICY_ENTROPY_EMA_INDEX == 420
    assert Slot.RL_ACTION_ENTROPY_EMA_INDEX == 583


@pytest.mark.parametrize("slot", list(Slot))
def test_every_slot_says_what_it_means_and_is_the_daemons(slot: Slot) -> None:
    assert slot.__doc__
    assert slot.__doc__.endswith(".")
    assert is_owned(slot)


@pytest.mark.parametrize(
    ("slot", "owned"), [(0, False), (419, False), (421, False), (582, False), (639, True), (640, False)]
)
def test_the_rest_is_the_users(slot: int, owned: bool) -> None:
    assert is_owned(slot) is owned


def test_cuda_gets_every_name_once() -> None:
    defines = slot_defines()
    assert defines["SLOT_RL_ACTION_ENTROPY_EMA_INDEX"] == 583
    assert defines["N_COUNTERS"] == len(Counter)
    assert len({name for name in defines if name.startswith("SLOT_")}) == len(Slot)


def test_every_source_has_a_slot_and_a_counter_of_its_own() -> None:
    assert len({slot for slot, _ in SOURCE_SLOTS.values()}) == len(SOURCE_SLOTS) == 3
    assert len({counter for _, counter in SOURCE_SLOTS.values()}) == 3
