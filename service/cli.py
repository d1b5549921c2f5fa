"""The command line: ``cotuned serve | status | read | state | keygen | config``.

Exit codes: 0 all is well; 1 what was asked for could not be done (said on standard error); 2 the arguments are off.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import yaml
from rich.console import Console
from rich.table import Table

from ..config.load import add_flags, load
from ..config.settings import Settings, reach
from ..wire.answers import ReadAnswer, StatusAnswer
from ..wire.connection import Connection
from ..wire.errors import CotunedError
from ..wire.keys import keys_from_environment
from ..wire.messages import Read, Status
from ..wire.protocol import DEFAULT_RUN, ENDPOINT_VARIABLE
from .daemon import serve
from .keygen import make_client, make_server
from .logs import logger, set_up
from .roles import Role
from .state_commands import add_state_commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser, flag_sources = _parser()
    namespace = parser.parse_args(arguments)
    try:
        code = namespace.run(namespace, flag_sources)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _give_up_output()
        return 1
    except (CotunedError, ValueError, OSError) as error:
        print(f"cotuned: {error}", file=sys.stderr)
        if isinstance(error, OSError):
            _give_up_output()
        return 1
    except KeyboardInterrupt:
        return 130


def _give_up_output() -> None:
    """The interpreter flushes once more at exit: what standard output did not take must not fail there again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    parser = argparse.ArgumentParser(
        prog="cotuned",
        allow_abbrev=False,
        description="Tunes the exploration of discrete Soft Actor-Critic from the executed actions.",
    )
    parser.add_argument("--version", action="version", version=f"cotuned {version('cotuned')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    flag_sources: dict[str, Any] = {}

    command = _add_command(commands, "serve", "run the daemon", _serve)
    command.set_defaults(settings="serve")
    flag_sources["serve"] = add_flags(command)

    command = _add_command(commands, "status", "ask a daemon how it is; exit code 0 if it answers", _status)
    _add_endpoint(command)
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")

    command = _add_command(commands, "read", "print one slot of a run", _read)
    command.add_argument("slot", help="number or name, e.g. 583 or ALPHA")
    command.add_argument("--run", dest="run_name", default=DEFAULT_RUN, help="name of the run (%(default)s)")
    _add_endpoint(command)

    state = _add_command(commands, "state", "look at what a daemon has kept, or start afresh; no daemon may run on it")
    add_state_commands(state, _add_command)
    command = _add_command(commands, "keygen", "make the daemon's or a client's CURVE keys", _keygen)
    command.set_defaults(parser=command)
    command.add_argument("name", nargs="?", help="name of the client")
    command.add_argument("--server", action="store_true", help="make the daemon's own keys")
    command.add_argument("--role", choices=[role.value for role in Role], help="what the client may do")
    command.add_argument("--directory", type=Path, default=Path("keys"), help="where they go (%(default)s)")

    config = _add_command(commands, "config", "look at settings").add_subparsers(metavar="COMMAND", required=True)
    command = _add_command(config, "show", "print the settings that `serve` would take, as YAML", _config_show)
    command.set_defaults(settings="config show")
    flag_sources["config show"] = add_flags(command)
    command = _add_command(config, "check", "check a settings file; exit code 0 if it can be used", _config_check)
    command.add_argument("file", help="YAML file")
    _add_command(config, "schema", "print the JSON schema of a settings file", _config_schema)
    return parser, flag_sources


def _add_command(commands: Any, name: str, what: str, run: Callable[..., int] | None = None) -> argparse.ArgumentParser:
    """One command. No abbreviations: a typo in a flag must not pass as another flag's beginning."""
    command = commands.add_parser(name, allow_abbrev=False, help=what)
    if run is not None:
        command.set_defaults(run=run)
    return command


def _add_endpoint(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--endpoint", help=f"the daemon's queries endpoint (default: ${ENDPOINT_VARIABLE}, else as configured here)"
    )
    command.add_argument("--timeout", type=float, default=2.0, help="seconds to wait for the answer (%(default)s)")


def _settings(namespace: argparse.Namespace, flag_sources: dict[str, Any]) -> Settings:
    return load(namespace.config, (flag_sources[namespace.settings], namespace))


def _serve(namespace: argparse.Namespace, flag_sources: dict[str, Any]) -> int:
    settings = _settings(namespace, flag_sources)
    set_up(settings.log.level)
    try:
        serve(settings)
    except CotunedError:
        raise
    except Exception as error:
        # Whatever it is, a supervisor sees one line with the cause, a traceback in it, and an exit code.
        logger.exception("failed", extra={"fields": {"error": repr(error)}})
        return 1
    return 0


def _endpoint(namespace: argparse.Namespace) -> str:
    if namespace.endpoint is not None:
        return namespace.endpoint
    named = os.environ.get(ENDPOINT_VARIABLE)
    if named:
        return named
    # In the daemon's own container its settings say where it listens; a wildcard is reached by loopback.
    return reach(load().endpoints.queries)


def _ask(namespace: argparse.Namespace, request: Status | Read, answer: type[Any]) -> Any:
    connection = Connection(_endpoint(namespace), namespace.timeout, keys_from_environment())
    try:
        return connection.ask(request, answer)
    finally:
        connection.close()


def _status(namespace: argparse.Namespace, _: dict[str, Any]) -> int:
    status: dict[str, Any] = asdict(_ask(namespace, Status(), StatusAnswer))
    if namespace.json:
        print(json.dumps(status))
        return 0
    table = Table(show_header=False, box=None)
    for name, value in status.items():
        table.add_row(name.replace("_", " "), _shown(value))
    Console().print(table)
    return 0


def _shown(value: Any) -> str:
    match value:
        case dict():
            return "\n".join(f"{key} {item}" for key, item in cast("dict[str, str]", value).items())
        case list():
            return ", ".join(cast("list[str]", value)) or "none"
        case float():
            return f"{value:.1f} s"
        case _:
            return str(value)


def _read(namespace: argparse.Namespace, _: dict[str, Any]) -> int:
    slot = int(namespace.slot) if namespace.slot.isascii() and namespace.slot.isdecimal() else namespace.slot
    print(f"{_ask(namespace, Read(slot, namespace.run_name), ReadAnswer).value!r}")
    return 0


def _keygen(namespace: argparse.Namespace, _: dict[str, Any]) -> int:
    if namespace.server == (namespace.name is not None) or namespace.server == (namespace.role is not None):
        namespace.parser.error("expected either --server, or a client's NAME and --role actor, learner or observer")
    if namespace.server:
        made = make_server(namespace.directory)
    else:
        made = make_client(namespace.directory, namespace.name, Role(namespace.role))
    print(*made, sep="\n")
    return 0


def _config_show(namespace: argparse.Namespace, flag_sources: dict[str, Any]) -> int:
    settings = _settings(namespace, flag_sources).model_dump(mode="json")
    print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")
    return 0


def _config_check(namespace: argparse.Namespace, _: dict[str, Any]) -> int:
    load(namespace.file, environment=False)
    print(f"{namespace.file}: can be used")
    return 0


def _config_schema(_: argparse.Namespace, __: dict[str, Any]) -> int:
    print(json.dumps(Settings.model_json_schema(), indent=2, ensure_ascii=False))
    return 0
