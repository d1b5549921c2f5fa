"""How a value that came over the wire is shown in an error: short, and at a bounded cost.

``f"{value!r:.80}"`` makes the whole text first: megabytes of it for a large bin, and a RecursionError, which no handler
of faulty frames expects, for a value nested a thousand deep.
"""

from __future__ import annotations

import reprlib


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = 6
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[:40]) + ("…" if len(value) > 40 else "")


_REPR = _Shown()


def shown(value: object, most: int = 80) -> str:
    """`value` as Python writes it, in at most `most` characters (and an ellipsis); what is nested deep is left out."""
    text = _REPR.repr(value)
    return text if len(text) <= most else text[:most] + "…"


def why(error: BaseException, most: int = 160) -> str:
    """An exception's kind and sentence, without its arguments: msgpack's and Unicode's hold the whole frame."""
    return f"{type(error).__name__}: {str(error)[:most]}"
