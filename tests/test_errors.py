"""The error tree: drawn as it is, and mapped both ways without gaps."""

from __future__ import annotations

import inspect

import pytest

from cotuned.wire import errors
from cotuned.wire.errors import CotunedError, RequestRefused, refusal

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, CotunedError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_is_in_the_drawing_and_documented(cls: type) -> None:
    assert cls.__name__ in (errors.__doc__ or "")
    assert cls.__doc__


@pytest.mark.parametrize("cls", RequestRefused.__subclasses__())
def test_every_refusal_comes_back_as_its_class(cls: type[RequestRefused]) -> None:
    error = refusal(cls.code, "why")
    assert type(error) is cls
    assert f'"{cls.code}"' in (errors.__doc__ or "")


def test_a_code_from_the_future_is_kept() -> None:
    error = refusal("moon_phase", "why")
    assert type(error) is RequestRefused
    assert error.code == "moon_phase"


def test_waits_that_end_are_timeouts() -> None:
    for cls in (errors.DaemonUnreachable, errors.WindowFull, errors.FlushTimeout):
        assert issubclass(cls, TimeoutError)
