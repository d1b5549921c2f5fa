"""From a YAML file, the environment and command-line flags to `Settings`, with a sentence for each fault."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError
from pydantic_settings import CliSettingsSource, EnvSettingsSource
from pydantic_settings.exceptions import SettingsError

from ..wire.errors import ConfigError
from .explain import explain
from .settings import Settings

CONFIG_VARIABLE = "COTUNED_CONFIG"
_PREFIX = "COTUNED_"
_NOT_SETTINGS = re.compile(r"COTUNED_(CONFIG|ENDPOINT|CLIENT_KEY|SERVER_KEY|SERVICE_.*|PORT|PORT_.*)")
"""Ours for clients and the command line, and what Kubernetes sets in pods beside a service that is called `cotuned`."""

Values = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> CliSettingsSource[Any]:
    """Adds ``--config`` and one flag for each setting (``--tuner.lr_tau``) to a parser; `load` takes the result."""
    parser.add_argument("--config", metavar="FILE", help=f"YAML file with settings (or ${CONFIG_VARIABLE})")
    return CliSettingsSource(
        Settings, root_parser=parser, cli_parse_args=False, cli_hide_none_type=True, cli_implicit_flags=True
    )


def load(
    file: str | os.PathLike[str] | None = None,
    flags: tuple[CliSettingsSource[Any], argparse.Namespace] | None = None,
    environment: bool = True,
) -> Settings:
    """Settings from all sources, in rising order: defaults, file, environment, flags.

    Args:
        file: YAML file; None: the one that ``COTUNED_CONFIG`` names, if any.
        flags: what `add_flags` returned, and the parsed namespace.
        environment: whether ``COTUNED_…`` variables count.

    Raises:
        ConfigError: one line for each fault: the key's path, what was given and from where, what is allowed.
    """
    if file is None and environment:
        file = os.environ.get(CONFIG_VARIABLE)
    sources: list[tuple[str, Values]] = []
    if file is not None:
        sources.append((f"file {os.fspath(file)}", read_file(file)))
    if environment:
        sources.append(("environment", _read_environment()))
    if flags is not None:
        sources.append(("command line", _read_flags(*flags)))
    merged: Values = {}
    for _, values in sources:
        merged = _merge(merged, values)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, sources)) from None


def read_file(file: str | os.PathLike[str]) -> Values:
    """The map in a YAML file; an empty file is an empty map.

    Raises:
        ConfigError: not readable, not YAML, a key twice, or not a map.
    """
    path = Path(file)
    try:
        document: Any = yaml.load(path.read_text("utf-8"), _UniqueKeys)  # a SafeLoader
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the settings file {path} is not YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"the settings file {path} holds a {type(document).__name__}, expected keys and values")
    return {str(key): value for key, value in cast("dict[Any, Any]", document).items()}


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys and says nothing; a typo of that kind must not go unseen."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = cast(Any, self).construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"found the key {key!r} twice", key_node.start_mark)
            seen.add(key)
        return cast(Any, super()).construct_mapping(node, deep)


def _read_environment() -> Values:
    known = set(Settings.model_fields)
    for name in os.environ:
        if name.upper().startswith(_PREFIX) and not _NOT_SETTINGS.fullmatch(name.upper()):
            key = name[len(_PREFIX) :].split("__")[0].lower()
            if key not in known:
                raise ConfigError(
                    f"environment variable {name}: there is no setting {key!r}; the first part is one of "
                    f"{', '.join(sorted(known))}, and parts are joined by '__', e.g. COTUNED_TUNER__LR_TAU"
                )
    try:
        return EnvSettingsSource(Settings)()
    except (SettingsError, ValueError) as error:
        raise ConfigError(f"environment: {error}; expected JSON for a setting that is a map") from error


def _read_flags(source: CliSettingsSource[Any], namespace: argparse.Namespace) -> Values:
    # Those not given must not count, nor may the parser's own entries (--config, the subcommand).
    given = {name: value for name, value in vars(namespace).items() if name.split(".")[0] in Settings.model_fields}
    try:
        return source(parsed_args=argparse.Namespace(**given))()
    except (SettingsError, ValueError) as error:
        raise ConfigError(f"command line: {error}; expected JSON for a setting that is a map") from error


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> Values:
    merged = dict(low)
    for key, value in high.items():
        under = merged.get(key)
        both = isinstance(under, dict) and isinstance(value, dict)
        merged[key] = _merge(cast(Values, under), cast(Values, value)) if both else value
    for one, other in (("target_entropy", "target_ratio"), ("target_ratio", "target_entropy")):
        if one in high and other in low and other not in high:
            del merged[other]  # two ways to say one thing: the later source decides, whichever way it says it
    return merged
