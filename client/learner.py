"""`LearnerClient`: a learner asks for α and τ, and reads and writes the bus."""

from __future__ import annotations

import secrets
from types import TracebackType
from typing import Any

from ..wire.answers import AttachAnswer, CotuneAnswer, EntropyAnswer, ReadAnswer, StatsAnswer, StatusAnswer
from ..wire.connection import Connection, default_endpoint
from ..wire.errors import InvalidRequest
from ..wire.keys import Keys, keys_from_environment
from ..wire.messages import Attach, Cotune, Entropy, Read, Stats, Status, Write
from ..wire.protocol import DEFAULT_RUN
from .arrays import index
from .device_row import DeviceRow


class LearnerClient:
    """A learner's session with the daemon.

    A *session* is one life of a learner: steps are counted within it, and the newest session of a run owns tuning. A
    learner that starts again from an older checkpoint opens a new client, hence a new session, and is served at once.

    Opening a client does not talk to the daemon yet; the first call does. Use one client in one thread at a time, and
    open it after a fork, not before.

    Args:
        endpoint: the daemon's queries endpoint. None: ``$COTUNED_ENDPOINT``, else ``tcp://127.0.0.1:5584``.
        run: name of the training job.
        session: 0 to 2^63 − 1; ranks of one data-parallel job pass the same one. None: a random one.
        timeout: seconds that a call may wait.
        keys: for a daemon with CURVE. None: from ``$COTUNED_CLIENT_KEY`` and ``$COTUNED_SERVER_KEY``, else none.

    Raises:
        ValueError: the endpoint, run name, session, timeout or key files cannot be used.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        run: str = DEFAULT_RUN,
        session: int | None = None,
        timeout: float = 5.0,
        keys: Keys | None = None,
    ) -> None:
        self.run = run
        self.session = secrets.randbits(63) if session is None else index("session", session)
        Cotune(self.session, 0, run)  # checked before a socket is opened
        self._connection = Connection(endpoint or default_endpoint(), timeout, keys or keys_from_environment())
        self._row: DeviceRow | None = None

    def cotune(self, step: int, policy_entropy: float | None = None) -> CotuneAnswer:
        """α and τ for this learner step; moves them if there is a new observation.

        Each step moves them at most once: asking again for the same or an older step gets the stored answer and changes
        nothing, so a call that timed out can be repeated. An answer that comes is durable: the daemon has it on disk,
        and says the same after a restart (unless it keeps no state).

        Args:
            step: the learner's step, an integer from 0 that grows within the session.
            policy_entropy: mean policy entropy at this step, nats; goes into slot 420 as an EMA. A scalar of NumPy,
                torch or CuPy will do.

        Raises:
            DaemonUnreachable: no answer within the timeout (AuthenticationFailed: it does not take our keys).
            RequestRefused: the daemon refused the request; the subclass says why.
            AttachmentLost: the step was taken by another daemon than the one whose memory is attached; said once.
        """
        entropy = None if policy_entropy is None else _number("policy_entropy", policy_entropy)
        request = _made(Cotune, self.session, _index("step", step), self.run, entropy)
        answer = self._connection.ask(request, CotuneAnswer)
        self._check_attachment()
        return answer

    def attach_device(self) -> DeviceRow:
        """Maps the run's row of the bus into this process, for a learner on the daemon's GPU.

        Needs CuPy. `DeviceRow` says what its reader may rely on. This client watches over the newest one.

        Raises:
            DeviceNotShared: the daemon's bus is not in GPU memory, or CUDA cannot export it.
            DeviceUnavailable: this process has no CuPy, runs on another host, or does not see that GPU.
            DaemonUnreachable, RequestRefused: as `cotune`.
        """
        answer = self._connection.ask(Attach(self.run), AttachAnswer)
        self._row = DeviceRow(answer, self.run, self._connection.generation)
        return self._row

    def _check_attachment(self) -> None:
        row, generation = self._row, self._connection.generation
        if row is not None and row.generation != generation:
            self._row = None
            row.lose(
                f"the daemon whose memory is attached for run {self.run!r} has ended and another one answers at "
                f"{self._connection.endpoint}; what is mapped stands still. Call attach_device() again; a step that "
                "was asked for gets its answer when asked for again"
            )
            row.check()

    def entropy(self) -> EntropyAnswer:
        """The entropies of the run as they stand; changes nothing. Raises as `cotune`, and `UnknownRun`."""
        return self._connection.ask(Entropy(self.run), EntropyAnswer)

    def read(self, slot: int | str) -> float:
        """One slot of the run's row, by number, `Slot` or registered name. Raises as `entropy`, and `UnknownSlot`."""
        return self._connection.ask(_made(Read, _slot(slot), self.run), ReadAnswer).value

    def write(self, slot: int | str, value: float) -> float:
        """Writes one of the user's slots and returns the value as float32 holds it.

        Raises as `cotune`, `UnknownSlot`, and `SlotReadOnly` for 420 and 583 to 639, which belong to the daemon.
        """
        return self._connection.ask(_made(Write, _slot(slot), _number("value", value), self.run), ReadAnswer).value

    def stats(self) -> StatsAnswer:
        """The run's counters: exact int64. Raises as `entropy`."""
        return self._connection.ask(Stats(self.run), StatsAnswer)

    def status(self) -> StatusAnswer:
        """The daemon as a whole. Raises as `cotune`."""
        return self._connection.ask(Status(), StatusAnswer)

    def close(self) -> None:
        """Closes the socket; nothing is pending between calls. An attached row stays. Closing twice does nothing."""
        self._connection.close()

    def __enter__(self) -> LearnerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _slot(slot: int | str) -> int | str:
    return slot if isinstance(slot, str) else _index("slot", slot)


def _index(name: str, value: Any) -> int:
    try:
        return index(name, value)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _number(name: str, value: Any) -> float:
    """A float from a number or a scalar of NumPy, torch or CuPy; text and bools are no numbers."""
    try:
        if not isinstance(value, str | bytes | bool):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise InvalidRequest(f"{name}: got {value!r:.80}, expected a number")


def _made(request: Any, *fields: Any) -> Any:
    """A request whose values were checked here get the same error that the daemon would answer."""
    try:
        return request(*fields)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
