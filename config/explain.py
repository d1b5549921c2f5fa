"""Turns pydantic's errors into one line each: the key's path, what was given and from where, and what is allowed."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Sequence
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from .settings import Settings


def explain(error: ValidationError, sources: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """One line for each fault.

    Args:
        error: what `Settings` raised.
        sources: name and values of each source, in rising order of precedence.
    """
    faults = [([str(part) for part in f["loc"] if part != "[key]"], f) for f in error.errors(include_url=False)]
    paths = [path for path, _ in faults]
    # A fault in `tuner` shows once more in every run that inherits it; the first one says it.
    lines = [_line(path, fault, sources) for path, fault in faults if not _inherited(path, paths, sources)]
    lines = list(dict.fromkeys(lines))
    return f"{len(lines)} fault{'s' if len(lines) > 1 else ''} in the settings:\n" + "\n".join(
        f"  {line}" for line in lines
    )


def _inherited(path: list[str], paths: Sequence[list[str]], sources: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Whether no source gives the run this key itself, and `tuner` has the same fault."""
    return path[:1] == ["runs"] and len(path) > 2 and ["tuner", *path[2:]] in paths and not _where(path, sources)


def _line(path: list[str], fault: Any, sources: Sequence[tuple[str, dict[str, Any]]]) -> str:
    kind, message = str(fault["type"]), str(fault["msg"]).removeprefix("Value error, ")
    where = _where(path, sources)
    if kind == "extra_forbidden":
        allowed = _fields_at(path[:-1])
        near = difflib.get_close_matches(path[-1], allowed, 1)
        hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"allowed are {', '.join(allowed)}"
        return f"{'.'.join(path)}: there is no such setting{where}; {hint}"
    if kind == "value_error":
        subject = message.split(":")[0].split(".")[0]
        joint = "." if subject in _fields_at(path) else ": "
        return f"{'.'.join(path)}{joint}{message}{where}" if path else f"{message}{where}"
    given = fault["input"]
    shown = "nothing" if kind == "missing" else repr(given)[:120]
    return f"{'.'.join(path)}: got {shown}{where}; allowed: {_allowed(kind, message, fault.get('ctx', {}))}"


def _allowed(kind: str, message: str, context: dict[str, Any]) -> str:
    match kind:
        case "greater_than_equal":
            return f"at least {context['ge']:g}"
        case "greater_than":
            return f"above {context['gt']:g}"
        case "less_than_equal":
            return f"at most {context['le']:g}"
        case "less_than":
            return f"below {context['lt']:g}"
        case "literal_error":
            return str(context["expected"])
        case "finite_number":
            return "a finite number"
        case "float_parsing" | "float_type":
            return "a number"
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            return "an integer"
        case "string_type":
            return "text"
        case "bool_parsing" | "bool_type":
            return "true or false"
        case "model_type" | "dict_type" | "model_attributes_type":
            return "keys and values"
        case _:
            return message


def _where(path: list[str], sources: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The last source that names the key: it is the one whose value counted."""
    for name, values in reversed(sources):
        node: Any = values
        for part in path:
            if not isinstance(node, dict) or part not in node:
                break
            node = cast("dict[str, Any]", node)[part]
        else:
            if name == "environment" and path:
                name = f"environment, COTUNED_{'__'.join(path).upper()}"
            return f" ({name})" if path else ""
    return ""


def _fields_at(path: Sequence[str]) -> list[str]:
    """Names of the settings in the section at `path`."""
    model: Any = Settings
    for part in path:
        annotation = model.model_fields[part].annotation if _is_model(model) and part in model.model_fields else None
        if annotation is None:  # a run's name: its section is the map's value type
            continue
        arguments = typing.get_args(annotation)
        model = arguments[1] if arguments else annotation
    return sorted(model.model_fields) if _is_model(model) else []


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)
