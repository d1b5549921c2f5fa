"""What a learner and its actors send each other: msgpack maps over ZeroMQ, arrays as raw bytes, never a pickle.

Lock step: the learner asks every actor for a round and takes the answers in the order of the actors' indices, so what
enters the replay buffer does not depend on which process was faster. Every wait has an end.

::

    actor   ──▶ {kind: hello}                                            once
    learner ──▶ {kind: act, round, step, phase, n_steps, policy, critics}
    actor   ──▶ {kind: transitions, round, observations, …}
    learner ──▶ {kind: stop}                                             at the end
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

import msgpack
import numpy as np
import zmq

_ARRAY = 1
"""Number of the msgpack extension type: (dtype, shape, bytes of a C-ordered array)."""
_DTYPES = {"<f4", "<i8", "|u1"}
_MAX_BYTES = 16 * 2**20


class ChannelError(RuntimeError):
    """The other side did not say in time what the protocol expects of it."""


def pack(message: Mapping[str, Any]) -> bytes:
    """A message as bytes."""
    return cast(bytes, msgpack.packb(dict(message), default=_pack_array))


def unpack(frame: bytes) -> dict[str, Any]:
    """The message in a frame; arrays in it are read-only.

    Raises:
        ChannelError: the frame is none of ours.
    """
    try:
        message = msgpack.unpackb(frame, ext_hook=_unpack_array)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ChannelError(f"got a frame of {len(frame)} bytes that cannot be read: {error}") from error
    if not isinstance(message, dict) or "kind" not in message:
        raise ChannelError("got a frame that is not a map with a kind")
    return message


def _pack_array(value: object) -> msgpack.ExtType:
    if not isinstance(value, np.ndarray) or value.dtype.str not in _DTYPES:
        raise TypeError(f"got {type(value).__name__}, expected an array of {sorted(_DTYPES)}")
    return msgpack.ExtType(_ARRAY, msgpack.packb((value.dtype.str, value.shape, value.tobytes())))


def _unpack_array(code: int, data: bytes) -> np.ndarray:
    dtype, shape, content = msgpack.unpackb(data)
    if code != _ARRAY or dtype not in _DTYPES:
        raise ValueError(f"got extension {code} of {dtype}, expected {_ARRAY} of {sorted(_DTYPES)}")
    return np.frombuffer(content, dtype=dtype).reshape(shape)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = 1000
    socket.maxmsgsize = _MAX_BYTES
    return socket


class LearnerChannel:
    """The learner's end.

    Args:
        endpoint: where to listen; whoever reaches it can send transitions, so keep it on a trusted network.
        actors: how many actors take part; their indices are 0 to `actors` − 1.
        timeout: seconds that a call may wait.
    """

    def __init__(self, endpoint: str, actors: int, timeout: float) -> None:
        self._endpoint, self._actors, self._timeout = endpoint, actors, timeout
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.router_mandatory = True
        self._socket.bind(endpoint)

    def wait_for_actors(self) -> None:
        """Returns when every actor has said hello.

        Raises:
            ChannelError: some did not within the timeout.
        """
        self._gather("hello")

    def ask(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sends one message to all actors and returns their answers in the order of their indices.

        Raises:
            ChannelError: an actor did not answer within the timeout, or is gone.
        """
        self._send_to_all(pack(message))
        answers = self._gather("transitions")
        if any(answer["round"] != message["round"] for answer in answers):
            raise ChannelError(f"got answers to rounds {[a['round'] for a in answers]}, expected {message['round']}")
        return answers

    def close(self) -> None:
        """Tells the actors to stop, and closes."""
        try:
            self._send_to_all(pack({"kind": "stop"}))
        except ChannelError:
            pass  # whoever is gone has stopped
        finally:
            self._socket.close()
            self._context.term()

    def _send_to_all(self, frame: bytes) -> None:
        for index in range(self._actors):
            try:
                self._socket.send_multipart([_identity(index), frame], zmq.DONTWAIT)
            except zmq.ZMQError as error:
                raise ChannelError(f"actor {index} cannot be reached: {error.strerror}") from error

    def _gather(self, kind: str) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self._timeout
        missing = {_identity(index): index for index in range(self._actors)}
        answers: dict[int, dict[str, Any]] = {}
        while missing:
            left = deadline - time.monotonic()
            if left <= 0 or not self._socket.poll(int(left * 1000) + 1):
                raise ChannelError(
                    f"no {kind} from actor {', '.join(str(i) for i in sorted(missing.values()))} at "
                    f"{self._endpoint} within {self._timeout:g} s"
                )
            identity, frame = self._socket.recv_multipart()
            message = unpack(frame)
            if identity not in missing or message["kind"] != kind:
                raise ChannelError(f"got {message['kind']!r} from {identity!r}, expected {kind!r} from {missing}")
            answers[missing.pop(identity)] = message
        return [answers[index] for index in range(self._actors)]


class ActorChannel:
    """An actor's end; says hello at once.

    Args:
        endpoint: where the learner listens.
        index: of this actor.
        timeout: seconds that `receive` may wait.
    """

    def __init__(self, endpoint: str, index: int, timeout: float) -> None:
        self._endpoint, self._timeout = endpoint, timeout
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _socket(self._context, zmq.DEALER)
        self._socket.identity = _identity(index)
        self._socket.connect(endpoint)
        self.send({"kind": "hello"})

    def receive(self) -> dict[str, Any] | None:
        """The learner's next order; None when it says stop.

        Raises:
            ChannelError: nothing came within the timeout.
        """
        if not self._socket.poll(int(self._timeout * 1000)):
            raise ChannelError(f"nothing came from the learner at {self._endpoint} within {self._timeout:g} s")
        message = unpack(self._socket.recv())
        return None if message["kind"] == "stop" else message

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one message; it waits in the socket if the learner is not there yet."""
        self._socket.send(pack(message))

    def close(self) -> None:
        """Closes the socket; what was sent gets a second to leave."""
        self._socket.close()
        self._context.term()


def _identity(index: int) -> bytes:
    return f"actor-{index}".encode()
