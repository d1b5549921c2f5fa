"""From a control frame to a checked request, or to the error that says what is wrong with it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from ..wire.errors import InvalidRequest
from ..wire.messages import Request
from ..wire.shown import shown


def _model(message: type[Any]) -> type[BaseModel]:
    """A strict pydantic model with the dataclass's fields. (Pydantic's strict mode takes no map for a dataclass.)"""
    hints = get_type_hints(message)
    columns: Any = {
        field.name: (hints[field.name], ... if field.default is MISSING else field.default) for field in fields(message)
    }
    return create_model(message.__name__, __config__=ConfigDict(extra="forbid", strict=True), **columns)


_MESSAGES: dict[str, tuple[type[Any], type[BaseModel]]] = {
    message.op: (message, _model(message)) for message in get_args(Request)
}


def parse_request(message: dict[str, Any]) -> Request:
    """The request in a decoded control map.

    Types and unknown keys are checked by pydantic, in strict mode; values by the message itself.

    Args:
        message: the map without ``v`` and ``id``.

    Raises:
        InvalidRequest: an unknown `op`, a field too many, missing, of another type, or with a value not allowed.
    """
    op = message.get("op")
    if not isinstance(op, str) or op not in _MESSAGES:
        raise InvalidRequest(f"op: got {shown(op)}, allowed are {', '.join(sorted(_MESSAGES))}")
    request, model = _MESSAGES[op]
    try:
        checked = model.model_validate({name: value for name, value in message.items() if name != "op"})
    except ValidationError as error:
        raise InvalidRequest("; ".join(_sentence(fault) for fault in error.errors(include_url=False)[:5])) from None
    try:
        return request(**dict(checked))
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _sentence(fault: Any) -> str:
    where = str(fault["loc"][0])
    match fault["type"]:
        case "missing":
            return f"{where}: missing"
        case "extra_forbidden":
            return f"{where}: there is no such field"
        case _:
            return f"{where}: got {shown(fault['input'])}; {fault['msg']}"
