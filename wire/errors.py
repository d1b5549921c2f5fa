"""The error tree of cotuned.

::

    CotunedError
    ├── DaemonUnreachable        nothing answered at the endpoint within the timeout
    │   └── AuthenticationFailed keys are missing, or not those that the other side wants
    ├── WindowFull               the window of unconfirmed batches stayed full for the timeout
    ├── FlushTimeout             batches were not confirmed as durable within the timeout
    ├── StreamLost               the daemon no longer knows batches that it had confirmed
    ├── BatchRejected            the daemon refused one batch; carries its number, a code and a sentence
    ├── InvalidActions           a batch was refused by the client before it was sent (also a ValueError)
    ├── ClientClosed             the client was closed, or is used in a forked child
    ├── ClientInUse              the client is in a call of another thread
    ├── FrameError               bytes on the wire that are not what the protocol says
    ├── ConfigError              a setting that cannot be used (one line a fault, with the key's path)
    ├── DeviceUnavailable        the device that was asked for is not there
    ├── AttachmentLost           the daemon whose memory is attached has ended; the values stand still
    ├── CapturingStream          what cannot be part of a CUDA graph was launched on a stream that captures one
    ├── DeviceBusy               actions on a GPU were not ready within the timeout
    ├── EndpointInUse            a socket could not be bound
    ├── StateInUse               another daemon or command has the state directory
    ├── StateMismatch            the state on disk is of another layout than the settings say
    ├── StateNotKept             the daemon ended and the disk did not take its last state
    └── RequestRefused           the daemon answered a request with an error
        ├── InvalidRequest       code "invalid_request"
        ├── ProtocolMismatch     code "protocol_mismatch"
        ├── ActionCountMismatch  code "action_count_mismatch"
        ├── UnknownRun           code "unknown_run"
        ├── UnknownSlot          code "unknown_slot"
        ├── SlotReadOnly         code "slot_read_only"
        ├── LimitReached         code "limit_reached"
        ├── Forbidden            code "forbidden"
        ├── DeviceNotShared      code "device_not_shared" (also a DeviceUnavailable)
        ├── StateUnavailable     code "state_unavailable"
        └── Stopping             code "stopping"

Every message says what was got, what was expected and what to do. Code branches on the class or on ``code``, never on
the sentence.
"""

from __future__ import annotations


class CotunedError(Exception):
    """Base of every error that cotuned raises on purpose."""


class DaemonUnreachable(CotunedError, TimeoutError):
    """No daemon answered at the endpoint within the timeout."""


class AuthenticationFailed(DaemonUnreachable):
    """A daemon is there and does not shake hands: the client's keys, or its lack of them, do not fit the daemon's."""


class WindowFull(CotunedError, TimeoutError):
    """The window of unconfirmed batches stayed full until the timeout; the batch being pushed is *not* sent."""


class FlushTimeout(CotunedError, TimeoutError):
    """`flush` ended before every pushed batch was durable; the client still holds them and goes on resending."""


class StreamLost(CotunedError):
    """The daemon confirmed batches earlier that it does not know any more, so counting them exactly once is over."""


class BatchRejected(CotunedError):
    """The daemon refused one batch; it changed no count.

    Attributes:
        sequence: number of the batch in its actor's stream, the value that `push` returned.
        code: why, as a word to branch on, e.g. ``"action_out_of_range"``.
    """

    def __init__(self, sequence: int, code: str, message: str) -> None:
        super().__init__(f"batch {sequence} was rejected ({code}): {message}")
        self.sequence = sequence
        self.code = code


class InvalidActions(CotunedError, ValueError):
    """A batch that cannot be sent as it is; nothing was sent and nothing changed."""


class ClientClosed(CotunedError):
    """The client was closed before, or belongs to another process (sockets do not survive a fork)."""


class ClientInUse(CotunedError):
    """The client is in a call of another thread; nothing was done. One client belongs to one thread at a time."""


class FrameError(CotunedError, ValueError):
    """Bytes that are not a frame of this protocol. `code` is "bad_frame" or "protocol_mismatch"."""

    def __init__(self, message: str, code: str = "bad_frame") -> None:
        super().__init__(message)
        self.code = code


class ConfigError(CotunedError, ValueError):
    """Settings that cannot be used; the message has one line a fault."""


class DeviceUnavailable(CotunedError):
    """The device that the configuration names cannot be used here."""


class AttachmentLost(CotunedError):
    """The daemon whose memory is attached has ended; what is mapped stays readable and stands still."""


class CapturingStream(CotunedError, RuntimeError):
    """An entropy step or a push was asked of a stream that captures a CUDA graph; nothing was done."""


class DeviceBusy(CotunedError, TimeoutError):
    """The work that makes the actions of a batch did not end within the timeout; the batch was not sent."""


class EndpointInUse(CotunedError):
    """A socket could not be bound: the address is taken or not of this machine."""


class StateInUse(CotunedError):
    """Another daemon, or a ``cotuned state`` command, holds the state directory."""


class StateMismatch(CotunedError):
    """The state on disk is of another layout than the settings (or this version) say; it was not changed."""


class StateNotKept(CotunedError):
    """The daemon ended without a last commit. What had been told to clients was durable before."""


class RequestRefused(CotunedError):
    """The daemon answered with an error. `code` is the class's, or the one that a newer daemon sent."""

    code = "refused"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class InvalidRequest(RequestRefused):
    """The request is malformed, or a value in it is not allowed."""

    code = "invalid_request"


class ProtocolMismatch(RequestRefused):
    """Client and daemon speak different protocol versions."""

    code = "protocol_mismatch"


class ActionCountMismatch(RequestRefused):
    """The client was built for another number of actions than the daemon."""

    code = "action_count_mismatch"


class UnknownRun(RequestRefused):
    """No batch and no `cotune` has named this run yet."""

    code = "unknown_run"


class UnknownSlot(RequestRefused):
    """No such slot number or registered slot name."""

    code = "unknown_slot"


class SlotReadOnly(RequestRefused):
    """The slot belongs to the daemon."""

    code = "slot_read_only"


class LimitReached(RequestRefused):
    """A configured limit (runs, actors) does not allow one more."""

    code = "limit_reached"


class Forbidden(RequestRefused):
    """The connection's key has not the role that the request needs, or the stream belongs to another key."""

    code = "forbidden"


class DeviceNotShared(RequestRefused, DeviceUnavailable):
    """The daemon's bus and this process have no GPU memory in common: a bus in host memory, another GPU or host."""

    code = "device_not_shared"


class StateUnavailable(RequestRefused):
    """The daemon cannot write its state to disk now, so it cannot promise that the change survives; ask again later.

    Nothing was changed, or, where the disk failed in between, asking again for the same step gets its answer.
    """

    code = "state_unavailable"


class Stopping(RequestRefused):
    """The daemon is shutting down; ask again when it is back."""

    code = "stopping"


_BY_CODE: dict[str, type[RequestRefused]] = {cls.code: cls for cls in RequestRefused.__subclasses__()}


def refusal(code: str, message: str) -> RequestRefused:
    """The exception for an error answer; a code that this version does not know becomes a plain `RequestRefused`."""
    cls = _BY_CODE.get(code)
    return cls(message) if cls is not None else RequestRefused(message, code)
