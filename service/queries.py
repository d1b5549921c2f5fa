"""Answers to control messages: one method for each kind of request."""

from __future__ import annotations

import difflib
import math
import time
from dataclasses import replace
from importlib.metadata import version

from ..config.settings import Settings
from ..kernels import DeviceSharing, IsvBus, RowState
from ..wire.answers import (
    AcknowledgeAnswer,
    AttachAnswer,
    CotuneAnswer,
    EntropyAnswer,
    HelloAnswer,
    ReadAnswer,
    ShareAnswer,
    StatsAnswer,
    StatusAnswer,
)
from ..wire.errors import ActionCountMismatch, DeviceNotShared, InvalidRequest, SlotReadOnly, UnknownSlot
from ..wire.host import WITHOUT_SHARED_MEMORY
from ..wire.messages import (
    Acknowledge,
    Attach,
    Cotune,
    Entropy,
    Goodbye,
    Hello,
    Read,
    Request,
    Share,
    Stats,
    Status,
    Write,
)
from ..wire.protocol import PROTOCOL_VERSION
from ..wire.slots import Counter, PoolColumn, Slot, TunerStatus, is_owned
from .changes import Changes
from .durability import Durability
from .reason import reason
from .runs import Run, Runs
from .sessions import Turn
from .streams import Streams
from .tally import Tally

Answer = (
    HelloAnswer
    | AcknowledgeAnswer
    | AttachAnswer
    | CotuneAnswer
    | EntropyAnswer
    | ReadAnswer
    | ShareAnswer
    | StatsAnswer
    | StatusAnswer
    | None
)


class Queries:
    """What the daemon answers. Changes the bus only for a new learner step, a write, or a run's first mention.

    Args:
        settings: the daemon's.
        bus: where the runs' rows are.
        runs: all runs.
        streams: all actor streams.
        endpoints: where the sockets listen, by name.
        tally: counts of what came in.
        changes: is told what changed.
        durability: says whether a change can be kept.
    """

    def __init__(
        self,
        settings: Settings,
        bus: IsvBus,
        runs: Runs,
        streams: Streams,
        endpoints: dict[str, str],
        tally: Tally,
        changes: Changes,
        durability: Durability,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._runs = runs
        self._streams = streams
        self._endpoints = endpoints
        self._tally = tally
        self._changes = changes
        self._durability = durability
        self._started = time.monotonic()
        self._version = version("cotuned")
        self._max_entropy = math.log(settings.n_actions)

    def answer(self, request: Request) -> tuple[Answer, int]:
        """The answer to a checked request, and the number of the snapshot with which it may be told; 0: at once.

        Raises:
            RequestRefused: it cannot be served; nothing changed.
        """
        match request:
            case Cotune():
                return self._cotune(request)
            case Write():
                return self._write(request)
            case _:
                return self._answer_at_once(request), 0

    def _answer_at_once(
        self, request: Acknowledge | Hello | Goodbye | Entropy | Read | Attach | Share | Stats | Status
    ) -> Answer:
        match request:
            case Acknowledge():
                return self._streams.acknowledge(request, self._durability.failure is not None)
            case Hello():
                return self._hello(request)
            case Goodbye():
                return self._streams.close(request.stream)
            case Entropy():
                return self._entropy(request)
            case Read():
                slot = self._slot(request.slot)
                run = self._runs.find(request.run)
                return ReadAnswer(slot, float(self._bus.row(run.row).slots[slot]))
            case Attach():
                return self._attach(request)
            case Share():
                return self._share(request)
            case Stats():
                return self._stats(request)
            case Status():
                return self._status()

    def _hello(self, hello: Hello) -> HelloAnswer:
        if hello.n_actions is not None and hello.n_actions != self._settings.n_actions:
            raise ActionCountMismatch(
                f"n_actions: the actor was built for {hello.n_actions} actions, this daemon for "
                f"{self._settings.n_actions}; start a daemon with n_actions: {hello.n_actions} for it"
            )
        run = self._runs.find_or_open(hello.run)
        stream, known = self._streams.open(hello, run)
        return HelloAnswer(
            n_actions=self._settings.n_actions,
            last=stream.last,
            known=known,
            actions_endpoint=self._endpoints["actions"],
            max_frame_bytes=self._settings.limits.max_frame_bytes,
        )

    def _cotune(self, request: Cotune) -> tuple[CotuneAnswer, int]:
        entropy = request.policy_entropy
        if entropy is not None and entropy > self._max_entropy * (1 + 1e-3):
            raise InvalidRequest(
                f"policy_entropy: got {entropy:g}, allowed is [0, ln K] = [0, {self._max_entropy:.4f}] nats; "
                "a value in bits times ln 2 is one in nats"
            )
        run = self._runs.get(request.run)
        turn = Turn.NEW_STEP if run is None else run.sessions.turn(request.session, request.step)
        if run is not None and turn is Turn.REPEATED and run.sessions.stored is not None:
            if not self._durability.holds(run.answered_in):
                self._durability.check(taken=True)
            return run.sessions.stored, run.answered_in
        if run is not None and turn is Turn.NOT_OWNER:
            why = "read only: a newer learner session owns the tuning of this run"
            answer = self._describe(run, request.step, self._bus.row(run.row))
            return replace(answer, owner=False, fresh=False, at_bound=False, reason=why), 0
        self._durability.check()
        run = self._runs.find_or_open(request.run)
        answer = self._describe(run, request.step, self._bus.cotune(run.row, entropy))
        run.sessions.answered(request.session, request.step, answer)
        run.answered_in = self._changes.changed(run)
        return answer, run.answered_in

    def _describe(self, run: Run, step: int, state: RowState) -> CotuneAnswer:
        slots, counters = state.slots, state.counters
        status = TunerStatus(int(slots[Slot.TUNER_STATUS]))
        return CotuneAnswer(
            run=run.name,
            step=step,
            alpha=float(slots[Slot.ALPHA]),
            log_alpha=float(slots[Slot.LOG_ALPHA]),
            tau=float(slots[Slot.TAU]),
            log_tau=float(slots[Slot.LOG_TAU]),
            entropy=float(slots[Slot.RL_ACTION_ENTROPY_EMA_INDEX]),
            policy_entropy=state.if_seen(Slot.RL_POLICY_ENTROPY_EMA_INDEX, Counter.POLICY_OBSERVATIONS),
            conditional_entropy=state.if_seen(Slot.CONDITIONAL_ENTROPY_EMA, Counter.CONDITIONAL_OBSERVATIONS),
            gate_rate=state.if_seen(Slot.GATE_RATE_EMA, Counter.GATE_OBSERVATIONS),
            target_entropy=float(slots[Slot.EFFECTIVE_TARGET]),
            error=state.if_seen(Slot.ENTROPY_ERROR, Counter.UPDATES),
            source=run.tuner.source,
            observations=int(counters[Counter.OBSERVATIONS]),
            ready=status is not TunerStatus.WAITING,
            fresh=status in (TunerStatus.UPDATED, TunerStatus.AT_BOUND),
            at_bound=status is TunerStatus.AT_BOUND,
            owner=True,
            reason=reason(state, run.tuner, self._settings) + self._no_actor(run, state),
        )

    def _no_actor(self, run: Run, state: RowState) -> str:
        """A hint where the learner's run name may be a typo."""
        batches = state.counters[Counter.BATCHES_TRAIN] + state.counters[Counter.BATCHES_PREFILL]
        if run.streams or batches:
            return ""
        return f"; no actor has opened the run {run.name!r}, runs are: {', '.join(self._runs.names)[:200]}"

    def _entropy(self, request: Entropy) -> EntropyAnswer:
        run = self._runs.find(request.run)
        state = self._bus.row(run.row)
        return EntropyAnswer(
            run=run.name,
            entropy=float(state.slots[Slot.RL_ACTION_ENTROPY_EMA_INDEX]),
            last_entropy=float(state.slots[Slot.ACTION_ENTROPY]),
            policy_entropy=state.if_seen(Slot.RL_POLICY_ENTROPY_EMA_INDEX, Counter.POLICY_OBSERVATIONS),
            conditional_entropy=state.if_seen(Slot.CONDITIONAL_ENTROPY_EMA, Counter.CONDITIONAL_OBSERVATIONS),
            gate_rate=state.if_seen(Slot.GATE_RATE_EMA, Counter.GATE_OBSERVATIONS),
            max_entropy=self._max_entropy,
            observations=int(state.counters[Counter.OBSERVATIONS]),
            pooled_actions=int(state.pool[self._settings.n_actions + PoolColumn.ACTIONS]),
        )

    def _write(self, request: Write) -> tuple[ReadAnswer, int]:
        slot = self._slot(request.slot)
        if is_owned(slot):
            advice = "report it with cotune(policy_entropy=…)" if slot == 420 else "it can be read, not written"
            raise SlotReadOnly(f"slot: {slot} belongs to the daemon (as do 420 and 583 to 639); {advice}")
        self._durability.check()
        run = self._runs.find_or_open(request.run)
        written = self._bus.write(run.row, slot, request.value)
        return ReadAnswer(slot, float(written)), self._changes.changed(run)

    def _sharing(self, what: str) -> DeviceSharing:
        sharing = self._bus.sharing
        if sharing is None:
            raise DeviceNotShared(
                f"{what}: this daemon's bus lives in host memory ({self._bus.device}), which no GPU maps; start it "
                f"with device: cuda, or {WITHOUT_SHARED_MEMORY}"
            )
        return sharing

    def _attach(self, request: Attach) -> AttachAnswer:
        sharing = self._sharing("attach")
        return sharing.export(self._runs.find_or_open(request.run).row)

    def _share(self, request: Share) -> ShareAnswer:
        stream = self._streams.get(request.stream)
        if stream is None:
            raise InvalidRequest("share: the stream is not open; say hello first")
        memory = self._sharing("share").open(request)
        stream.share(memory)
        return ShareAnswer(memory.size)

    def _slot(self, slot: int | str) -> int:
        if isinstance(slot, str):
            number = self._settings.bus.slot_names.get(slot)
            if number is None and slot in Slot.__members__:
                number = int(Slot[slot])
            if number is None:
                names = [*self._settings.bus.slot_names, *Slot.__members__]
                near = difflib.get_close_matches(slot.upper(), names, 1) or difflib.get_close_matches(slot, names, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
                raise UnknownSlot(f"slot: got the name {slot!r}; {hint} (bus.slot_names adds your own)")
            return number
        if not 0 <= slot < self._settings.bus.n_slots:
            raise UnknownSlot(f"slot: got {slot}, allowed are 0 to {self._settings.bus.n_slots - 1}")
        return slot

    def _stats(self, request: Stats) -> StatsAnswer:
        run = self._runs.find(request.run)
        state = self._bus.row(run.row)
        k = self._settings.n_actions

        def count(counter: Counter) -> int:
            return int(state.counters[counter])

        return StatsAnswer(
            run=run.name,
            observations=count(Counter.OBSERVATIONS),
            updates=count(Counter.UPDATES),
            batches_train=count(Counter.BATCHES_TRAIN),
            batches_prefill=count(Counter.BATCHES_PREFILL),
            actions_train=count(Counter.ACTIONS_TRAIN),
            actions_prefill=count(Counter.ACTIONS_PREFILL),
            batches_rejected=count(Counter.BATCHES_REJECTED),
            pooled_actions=int(state.pool[k + PoolColumn.ACTIONS]),
            pooled_counts=state.pool[:k].tolist(),
            batches_duplicate=run.batches_duplicate,
            batches_early=run.batches_early,
            actors=len(run.streams),
        )

    def _status(self) -> StatusAnswer:
        return StatusAnswer(
            version=self._version,
            protocol=PROTOCOL_VERSION,
            device=self._bus.device,
            n_actions=self._settings.n_actions,
            uptime=time.monotonic() - self._started,
            endpoints=self._endpoints,
            state=self._durability.state,
            runs=self._runs.names,
            actors=len(self._streams),
            batches=self._tally.batches,
            batches_rejected=self._tally.rejected,
            frames_malformed=self._tally.malformed,
            frames_unknown=self._tally.unknown,
        )
