"""What every group of settings has in common: ranges of numbers, and how strictly they are read."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST = 10**9  # of anything that is counted
LARGE = 1e30  # training computes in float32, which ends at 3.4e38
Whole = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Angle = Annotated[float, Field(ge=-360, le=360)]
Positive = Annotated[float, Field(gt=0, le=LARGE)]
NotNegative = Annotated[float, Field(ge=0, le=LARGE)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Factor = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A group of settings: unknown names are refused, nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())
