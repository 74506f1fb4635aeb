"""What every section shares: strictness, and the types people write as text (durations, sizes, paths,
addresses)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from extproc.config.address import MAX_SOCKET_PATH, parse_address


class Section(BaseModel):
    """A mapping of known keys. Unknown keys are errors, values are never converted behind one's back."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        revalidate_instances="always",  # defaults too must learn the folder that paths are meant from
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_all_defaults(cls, data: Any) -> Any:
        """``scrape:`` with nothing below it means the defaults."""
        return {} if data is None else data


@dataclass(slots=True, frozen=True)
class Written:
    """Marks a type for the reference: how it is called there and how a default is shown."""

    name: str
    show: Callable[[Any], str] = str


def wrong(message: str) -> PydanticCustomError:
    """An error whose text goes to the user as it is."""
    return PydanticCustomError("written", "{message}", {"message": message})


_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?(ms|s|m|h|d)")
_UNITS_B = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(B|KB|MB|GB|KiB|MiB|GiB|)")


def _seconds(value: object) -> object:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0 <= value < 1e9:
            raise wrong(f"`{value}` is no duration; write a number of seconds from 0 up, or like `10m`")
        return float(value)
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise wrong(
            f"`{shown(value)}` is no duration; write like `500ms`, `1s`, `10m`, or a number of seconds"
        )
    return float(found[1]) * _UNITS_S[found[2]]


def show_seconds(value: float) -> str:
    """A duration as a person writes it."""
    if value and value < 1:
        return f"{value * 1000:.12g}ms"
    for unit, factor in (("h", 3600), ("m", 60)):
        if value >= factor and value % factor == 0:
            return f"{value / factor:.12g}{unit}"
    return f"{value:.12g}s"


def _bytes(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < 2**53:
            raise wrong(f"`{value}` is no size; write a number of bytes from 0 up, or like `64MiB`")
        return value
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise wrong(f"`{shown(value)}` is no size; write like `64MiB`, `512KiB`, or a number of bytes")
    return int(float(found[1]) * _UNITS_B[found[2]])


def show_bytes(value: int) -> str:
    """A size as a person writes it."""
    for unit in ("GiB", "MiB", "KiB"):
        if value and value % _UNITS_B[unit] == 0:
            return f"{value // _UNITS_B[unit]}{unit}"
    return f"{value}B"


def folder_of(info: ValidationInfo) -> Path | None:
    """The folder that relative paths are meant from: that of the configuration file, given as context."""
    folder = (info.context or {}).get("folder")
    return folder if isinstance(folder, Path) else None


def _path(value: object, info: ValidationInfo) -> object:
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value or "\0" in value:
        raise wrong(f"`{shown(value)}` is no path; write the path of a file or folder as text")
    folder = folder_of(info)
    return Path(value) if folder is None else folder / value


def _address(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str):
        raise wrong(f"`{shown(value)}` is no address; write `HOST:PORT` or `unix:PATH` in quotes")
    if "\0" in value:
        raise wrong("an address cannot hold a NUL character; remove it")
    try:
        address = parse_address(value)
    except ValueError as error:
        raise wrong(str(error)) from None
    folder = folder_of(info)
    if not address.path:
        return str(address)
    path = address.path if folder is None else str(folder / address.path)
    if len(path.encode(errors="replace")) > MAX_SOCKET_PATH:
        raise wrong(f"the socket's path `{path}` is longer than {MAX_SOCKET_PATH} bytes; write a shorter one")
    return f"unix:{path}"


def _names(value: object) -> object:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise wrong(f"`{shown(value)}` is no name; write a name, or a list of names")


def _mapping(value: object) -> object:
    return {} if value is None else value


def _sequence(value: object) -> object:
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise wrong("must be a list; begin each item with `- `")


def shown(value: object) -> str:
    """A wrong value for a message, short and on one line."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


Duration = Annotated[float, BeforeValidator(_seconds), Written("duration", show_seconds)]
"""Seconds. Written as ``500ms``, ``1s``, ``10m``, ``1h`` or a number of seconds."""
Size = Annotated[int, BeforeValidator(_bytes), Written("size", show_bytes)]
"""Bytes. Written as ``64MiB``, ``512KiB`` or a number of bytes."""
FilePath = Annotated[Path, BeforeValidator(_path), Written("path")]
"""A path; relative ones are meant from the configuration file's folder."""
AddressText = Annotated[str, BeforeValidator(_address), Written("address")]
"""``unix:PATH`` or ``HOST:PORT``; see :func:`extproc.config.address.parse_address`."""
Name = Annotated[str, Field(min_length=1, max_length=512), Written("name")]
Names = Annotated[tuple[Name, ...], BeforeValidator(_names), Written("name or list of names")]
Table = BeforeValidator(_mapping)
"""Marks a mapping that may be left empty (``pools:``)."""
Listing = BeforeValidator(_sequence)
"""Marks a list (kept as a tuple) that may be left empty (``routes:``)."""
