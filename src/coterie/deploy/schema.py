"""What values from another machine may be. Everything that arrives is parsed as one of these types, or refused.

A `Strict` model has exactly the fields that it names, of exactly their types, finite and within their bounds, and does
not change afterwards. `parse` is the only place where bytes from others become values.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from coterie.core.errors import ConfigError
from coterie.core.targets import from_json
from coterie.deploy.refused import CODES, Refused
from coterie.evaluation.metrics import LARGEST, about, is_known

T = TypeVar("T")
MAX_NAME_LENGTH = 200
MAX_SITES = 10_000
MAX_EXAMPLES = 10**9
MAX_CLASSES = 10**6
MAX_METRICS = 1000
MAX_ROUNDS = 10**7
MAX_VALUES = 2**28  # in one example
MAX_FOLDS = 100
MAX_TRIALS = 1000  # in one message
MAX_LETTERS = 10 * MAX_SITES  # in one envelope


class Strict(BaseModel):
    """A value from another machine."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True, hide_input_in_errors=True
    )


def parse(kind: TypeAdapter[T], data: bytes | str, code: str = "bad-header") -> T:
    """Parse JSON as a type; raise `Refused` if it is not one. What it says is not repeated, only where it is wrong."""
    try:
        return kind.validate_json(data)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(each) for each in first["loc"])
        raise Refused(code, f"{error.error_count()} values are wrong: {where[:80]!a} ({first['type']})") from None


def problem_of_name(name: str) -> str | None:
    """Return what is wrong with a site's name, or None."""
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        return f"it has {len(name)} characters instead of 1 to {MAX_NAME_LENGTH}"
    if name != name.strip() or not all(unicodedata.category(each)[0] != "C" for each in name):
        return "it has control characters, or begins or ends with a space"
    return None


def _checked_name(name: str) -> str:
    if (problem := problem_of_name(name)) is not None:
        raise ValueError(problem)
    return name


def _checked_code(code: str) -> str:
    if code not in CODES:
        raise ValueError("an unknown code")
    return code


def _checked_scores(scores: dict[str, float | None]) -> dict[str, float | None]:
    if not all(len(name) <= MAX_NAME_LENGTH and is_known(name) for name in scores) or len(scores) > MAX_METRICS:
        raise ValueError("unknown metrics")
    if any(value is not None and not about(name).low <= value <= about(name).high for name, value in scores.items()):
        raise ValueError("a metric outside of its range")
    return scores


def _checked_target(text: str) -> str:
    try:
        if text and not 1 <= (from_json(json.loads(text)).num_outputs or 0) <= MAX_CLASSES:
            raise ValueError("a number of outputs that cannot be")
    except (ConfigError, ValueError, AttributeError, RecursionError, OverflowError):
        raise ValueError("no target") from None
    return text


def _few_values(shape: tuple[int, ...]) -> tuple[int, ...]:
    values = 1
    for length in shape:
        values *= length
    if values > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    return shape


Name = Annotated[str, AfterValidator(_checked_name)]
Run = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,200}$")]
Code = Annotated[str, AfterValidator(_checked_code)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PublicKey = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[\x20-\x7e]*$")]
Life = Annotated[int, Field(ge=0, le=MAX_ROUNDS)]
RoundNumber = Annotated[int, Field(ge=0, le=MAX_ROUNDS + 2)]
ClientId = Annotated[int, Field(ge=0, lt=MAX_SITES)]
Examples = Annotated[int, Field(ge=1, le=MAX_EXAMPLES)]
Classes = Annotated[int, Field(ge=2, le=MAX_CLASSES)]
Bytes = Annotated[int, Field(ge=0, le=2**40)]
Hash64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TargetText = Annotated[str, Field(max_length=100_000), AfterValidator(_checked_target)]  # JSON of a target
Shape = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MAX_VALUES)], ...], Field(max_length=8), AfterValidator(_few_values)
]
Scores = Annotated[dict[str, float | None], AfterValidator(_checked_scores)]  # None: not defined
# A number that a site computed; None: not defined. Metrics have closer bounds, which depend on their names.
Measured = Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None
Setting = Annotated[str, Field(max_length=200)] | bool | int | float | None
Settings = Annotated[dict[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,100}$")], Setting], Field(max_length=200)]
Part = Literal["validation", "test", "global_validation", "global_test"]
Who = Literal["own", "alone"]
Metrics = dict[Part, Scores]
Complaint = tuple[RoundNumber, Name, Code]  # about mail that a site refused: its round, its sender, the reason


class Scaling(Strict):
    """How bytes become numbers: `coterie.core.decode.Decode`."""

    mean: tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...] = Field(min_length=1, max_length=1000)
    std: tuple[Annotated[float, Field(gt=0, le=1e6)], ...] = Field(min_length=1, max_length=1000)

    @pydantic.model_validator(mode="after")
    def _as_many(self) -> Any:
        if len(self.mean) != len(self.std):
            raise ValueError("as many means as standard deviations are needed")
        return self
