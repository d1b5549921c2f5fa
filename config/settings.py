"""Everything that a user may set: one field, one line, its unit. Checked when the daemon starts, and only then."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ..wire.protocol import MAX_ACTIONS, MIN_ACTIONS, check_name
from ..wire.slots import DEFAULT_MAX_RUNS, DEFAULT_N_SLOTS, MIN_N_SLOTS, Slot, is_owned
from .section import NotNegative, Positive, Section, refuse_bool
from .security_settings import SecuritySettings
from .state_settings import StateSettings


def _name_of(kind: str) -> AfterValidator:
    def check(name: str) -> str:
        check_name(kind, name)
        return name

    return AfterValidator(check)


def _is_host_and_port(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon and host) and port.isdigit() and int(port) <= 65535


def _check_endpoint(endpoint: str) -> str:
    scheme, separator, rest = endpoint.partition("://")
    if separator and scheme == "ipc" and rest.startswith("/") and len(rest.encode()) <= 107:
        return endpoint
    if separator and scheme == "tcp" and _is_host_and_port(rest):
        return endpoint
    raise ValueError(
        f"got {endpoint!r:.120}, expected tcp://HOST:PORT (port 0: any free one) or ipc:///ABSOLUTE/PATH, "
        "the path of at most 107 bytes"
    )


Endpoint = Annotated[str, AfterValidator(_check_endpoint)]


class BusSettings(Section):
    """The ISV bus."""

    max_runs: int = Field(default=DEFAULT_MAX_RUNS, ge=1, le=4096, description="Rows of the bus: most runs at a time.")
    n_slots: int = Field(default=DEFAULT_N_SLOTS, ge=MIN_N_SLOTS, le=65536, description="float32 slots in a row.")
    slot_names: dict[Annotated[str, _name_of("slot")], int] = Field(
        default_factory=dict, description="Names for the user's own slots: name to number."
    )

    @model_validator(mode="after")
    def _check_slot_names(self) -> BusSettings:
        for name, slot in self.slot_names.items():
            if not 0 <= slot < self.n_slots or is_owned(slot):
                raise ValueError(
                    f"slot_names.{name}: got {slot}, allowed are 0 to {self.n_slots - 1} except 420 and 583 to 639, "
                    "which belong to the daemon"
                )
            if name in Slot.__members__ or name.isdigit():
                raise ValueError(f"slot_names.{name}: the name is taken by the daemon or is a number; choose another")
        return self


class ObservationSettings(Section):
    """How executed actions become observations in slot 583."""

    ema_blend: float = Field(
        default=0.4, ge=0.4, le=1, description="Weight of the new observation in the EMAs; a fraction."
    )
    pool_min_actions: int = Field(
        default=1024,
        ge=1,
        le=2**40,
        description="Actions pooled before one observation is made; actions. 1: every batch.",
    )


class TunerSettings(Section):
    """How α and τ are moved. `runs.NAME` may override any of these for one run."""

    source: Literal["executed", "policy", "conditional"] = Field(
        default="executed", description="Entropy to steer by: slot 583, 420 or 593."
    )
    target_entropy: float | None = Field(default=None, description="What the source is steered to; nats, 0 to ln K.")
    target_ratio: float | None = Field(
        default=None, ge=0, le=1, description="The same as a fraction of ln K; 0.98 if neither is given."
    )
    lr_alpha: NotNegative = Field(default=3e-4, description="Adam step of log α; nats of log α an update. 0: α stays.")
    lr_tau: NotNegative = Field(default=0.01, description="Gain of log τ a nat of error and update. 0: τ stays.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Adam's decay of the first moment; a fraction.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="Adam's decay of the second moment; a fraction.")
    adam_epsilon: Positive = Field(default=1e-8, description="Adam's ε, in units of the error (nats).")
    alpha_initial: Positive = Field(default=0.2, description="α before the first update.")
    alpha_min: Positive = Field(default=1e-4, description="Lower bound of α.")
    alpha_max: Positive = Field(default=10.0, le=1e6, description="Upper bound of α.")
    tau_initial: Positive = Field(default=1.0, description="τ before the first update.")
    tau_min: Positive = Field(default=0.05, description="Lower bound of τ.")
    tau_max: Positive = Field(default=20.0, le=1e6, description="Upper bound of τ.")

    @model_validator(mode="after")
    def _check_order(self) -> TunerSettings:
        for name in ("alpha", "tau"):
            low, start, high = (cast(float, getattr(self, f"{name}_{part}")) for part in ("min", "initial", "max"))
            if not 1e-6 <= low <= start <= high or low == high:
                raise ValueError(
                    f"{name}: got min {low:g}, initial {start:g}, max {high:g}; "
                    "expected 1e-6 ≤ min ≤ initial ≤ max and min < max"
                )
        if self.target_entropy is not None and self.target_ratio is not None:
            raise ValueError(
                f"target_entropy and target_ratio: got both ({self.target_entropy:g} nats and {self.target_ratio:g}); "
                "give one of them"
            )
        return self

    def target(self, n_actions: int) -> float:
        """T in nats for K = `n_actions`."""
        if self.target_entropy is not None:
            return self.target_entropy
        return (0.98 if self.target_ratio is None else self.target_ratio) * math.log(n_actions)


class EndpointSettings(Section):
    """Where the daemon listens."""

    actions: Endpoint = Field(default="tcp://127.0.0.1:5583", description="PULL: batches of actors.")
    queries: Endpoint = Field(default="tcp://127.0.0.1:5584", description="ROUTER: what actors and learners ask.")
    watch: Endpoint = Field(default="tcp://127.0.0.1:5585", description="PUB: rows of the bus as they change.")

    @model_validator(mode="after")
    def _check_distinct(self) -> EndpointSettings:
        taken = [e for e in (self.actions, self.queries, self.watch) if not e.endswith(":0")]
        if len(set(taken)) != len(taken):
            raise ValueError(f"got {taken}, expected three different endpoints")
        return self


class HttpSettings(Section):
    """Health, readiness, metrics and a page, over HTTP."""

    endpoint: str | None = Field(
        default="http://127.0.0.1:8583",
        description="Where it listens: http://HOST:PORT (port 0: any free one); null: off.",
    )
    token_file: str | None = Field(
        default=None, description="File with the token that /metrics and / want; needed beyond loopback."
    )

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not (
            endpoint.startswith("http://") and _is_host_and_port(endpoint.removeprefix("http://"))
        ):
            raise ValueError(f"got {endpoint!r:.120}, expected http://HOST:PORT (port 0: any free one) or null")
        return endpoint


class LimitSettings(Section):
    """Bounds of what the daemon takes; all explicit."""

    max_actors: int = Field(default=8192, ge=1, le=2**20, description="Open streams (actor clients) at a time.")
    actor_expiry: Positive = Field(
        default=3600.0, description="Seconds without a sign of life after which a stream may make room for a new one."
    )
    max_frame_bytes: int = Field(default=16 * 2**20, ge=1024, le=2**30, description="Largest frame of a batch; bytes.")
    drain_batches: int = Field(
        default=2048, ge=1, le=65536, description="Most batches between two looks at the queries."
    )
    drain_bytes: int = Field(
        default=4 * 2**20, ge=1024, le=2**30, description="Most bytes of them; one more frame may pass."
    )
    backlog_batches: int = Field(
        default=4096, ge=1, le=2**20, description="Batches a connection may have waiting (HWM)."
    )


class LogSettings(Section):
    """What the daemon writes to standard error: one JSON object a line."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level written."
    )
    interval: Positive = Field(default=1.0, description="Seconds between the summary lines while there is load.")


class RunSettings(TunerSettings):
    """One run's tuner: the `tuner` section with this run's overrides laid over it."""


class Settings(BaseSettings):
    """All settings of `cotuned serve`.

    Sources in rising order of precedence: the defaults here, a YAML file, environment variables (``COTUNED_`` and the
    key's path with ``__`` between its parts, e.g. ``COTUNED_TUNER__LR_TAU=0.02``), flags (``--tuner.lr_tau``).
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix="COTUNED_",
        env_nested_delimiter="__",
        case_sensitive=False,
    )

    n_actions: int = Field(default=11, ge=MIN_ACTIONS, le=MAX_ACTIONS, description="K, the number of discrete actions.")
    device: Literal["auto", "cuda", "cpu"] = Field(
        default="auto", description="Where the bus lives: a CUDA GPU, NumPy, or the GPU if there is one."
    )
    bus: BusSettings = Field(default_factory=BusSettings, description="The ISV bus.")
    observation: ObservationSettings = Field(
        default_factory=ObservationSettings, description="How actions become observations."
    )
    tuner: TunerSettings = Field(default_factory=TunerSettings, description="How α and τ are moved.")
    runs: dict[Annotated[str, _name_of("run")], RunSettings] = Field(
        default_factory=dict, description="Overrides of `tuner` for single runs: run name to settings."
    )
    endpoints: EndpointSettings = Field(default_factory=EndpointSettings, description="Where the daemon listens.")
    security: SecuritySettings = Field(default_factory=SecuritySettings, description="Who may connect (CURVE).")
    http: HttpSettings = Field(default_factory=HttpSettings, description="Health, metrics and a page over HTTP.")
    limits: LimitSettings = Field(default_factory=LimitSettings, description="Bounds of what is taken.")
    state: StateSettings = Field(default_factory=StateSettings, description="What survives the daemon, and where.")
    log: LogSettings = Field(default_factory=LogSettings, description="What is written to standard error.")
    publish_interval: Positive = Field(default=0.1, description="Least seconds between two PUB messages of one run.")
    record: str | None = Field(default=None, description="File to append every accepted batch to, in the order taken.")
    insecure: bool = Field(
        default=False, description="Allow endpoints that are not loopback although nothing is encrypted."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        return refuse_bool(cls, value, info)

    @model_validator(mode="before")
    @classmethod
    def _lay_runs_over_tuner(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        values = cast("dict[str, Any]", data)
        runs, tuner = values.get("runs"), values.get("tuner", {})
        if not isinstance(runs, dict):
            return values
        base = tuner.model_dump(exclude_unset=True) if isinstance(tuner, TunerSettings) else tuner
        merged = {name: _overlay(base, run) for name, run in cast("dict[str, Any]", runs).items()}
        return {**values, "runs": merged}

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        top = math.log(self.n_actions)
        for path, tuner in [("tuner", self.tuner), *((f"runs.{name}", run) for name, run in self.runs.items())]:
            if not 0 <= tuner.target(self.n_actions) <= top:
                raise ValueError(
                    f"{path}.target_entropy: got {tuner.target_entropy:g} nats, allowed is [0, ln K] = [0, {top:.4f}] "
                    f"for n_actions = {self.n_actions}"
                )
        if len(self.runs) > self.bus.max_runs:
            raise ValueError(f"runs: got {len(self.runs)} runs, bus.max_runs allows {self.bus.max_runs}")
        exposed = [e for e in self.endpoints.model_dump().values() if not is_loopback(e)]
        if exposed and not (self.security.server_key or self.insecure):
            raise ValueError(
                f"endpoints: got {', '.join(exposed)}, which others on the network can reach, and CURVE is not set up: "
                "anyone could push actions and move α. Set security.server_key (`cotuned keygen --server` makes it), "
                "bind 127.0.0.1 or ipc://, or set insecure: true where only trusted hosts can reach it"
            )
        if self.http.endpoint and not (is_loopback(self.http.endpoint) or self.http.token_file or self.insecure):
            raise ValueError(
                f"http.endpoint: got {self.http.endpoint}, which others on the network can read; set http.token_file, "
                "or insecure: true where only trusted hosts can reach it"
            )
        return self

    def tuner_of(self, run: str) -> TunerSettings:
        """The tuner settings of a run: its own, or the common ones."""
        return self.runs.get(run, self.tuner)


def _overlay(base: Any, run: Any) -> Any:
    if run is None:
        run = {}
    if isinstance(run, TunerSettings) or not isinstance(run, dict) or not isinstance(base, dict):
        return cast(Any, run)  # a finished model, or a fault that the field's own validation names
    overrides, common = cast("dict[str, Any]", run), dict(cast("dict[str, Any]", base))
    if {"target_entropy", "target_ratio"} & set(overrides):  # a run's own target replaces the common one of either kind
        common.pop("target_entropy", None)
        common.pop("target_ratio", None)
    return {**common, **overrides}


def is_loopback(endpoint: str) -> bool:
    """Whether only this machine can reach the endpoint."""
    if endpoint.startswith("ipc://"):
        return True
    host = endpoint.partition("://")[2].rpartition(":")[0]
    return host in ("localhost", "[::1]") or host.startswith("127.")


def reach(endpoint: str) -> str:
    """The endpoint as this machine reaches it: a wildcard address by loopback."""
    for wildcard, loopback in (("0.0.0.0", "127.0.0.1"), ("*", "127.0.0.1"), ("[::]", "[::1]")):
        if endpoint.startswith(f"tcp://{wildcard}:"):
            return endpoint.replace(wildcard, loopback, 1)
    return endpoint
