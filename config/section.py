"""What all groups of settings share: frozen, no unknown keys, numbers that are numbers."""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def refuse_bool(model: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Pydantic takes true for 1; a setting that holds a number does not."""
    annotation = model.model_fields[str(info.field_name)].annotation
    if isinstance(value, bool) and annotation is not bool:
        takes_text = annotation is str or get_args(annotation) == (str, NoneType)
        raise ValueError(f"got {str(value).lower()}, expected {'text' if takes_text else 'a number'}")
    return value


class Section(BaseModel):
    """A group of settings; unknown keys are refused, and nothing changes after the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        return refuse_bool(cls, value, info)
