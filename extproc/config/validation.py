"""Document -> Settings, with pydantic's errors as problems: the line, and what to write instead."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from extproc.config.envoy_message import did_you_mean
from extproc.config.problem import ConfigError, Problem
from extproc.config.schema.base import Section, shown
from extproc.config.schema.settings import Settings
from extproc.config.yaml_source import Document

_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "dict_type": "a mapping (`key: value` lines, indented)",
    "model_type": "a mapping (`key: value` lines, indented)",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def settings_from(document: Document, folder: Path) -> Settings:
    """Validate ``extproc.yaml``. Relative paths in it are meant from ``folder``.

    Raises:
        ConfigError: with every unknown key and wrong value.
    """
    try:
        return Settings.model_validate(document.data, context={"folder": folder})
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise ConfigError([_problem(document, detail) for detail in found]) from error


def section_at(root: type[Section], path: Iterable[str | int]) -> type[Section] | None:
    """The model that describes the mapping at ``path``, None where there is none."""
    here: Any = root
    for step in path:
        here = section_of(here)
        if isinstance(here, type) and issubclass(here, Section):
            field = here.model_fields.get(str(step))
            if field is None:
                return None
            here = field.annotation
        else:
            here = _inside(here)
    here = section_of(here)
    return here if isinstance(here, type) and issubclass(here, Section) else None


def section_of(annotation: Any) -> Any:
    """An annotation without ``Annotated`` and ``| None``."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin is Union or origin is types.UnionType:
            annotation = next(part for part in get_args(annotation) if part is not type(None))
        else:
            return annotation


def _inside(annotation: Any) -> Any:
    """What the values of a mapping, or the items of a list, are."""
    arguments = get_args(annotation)
    if not arguments:
        return None
    return arguments[1] if typing.get_origin(annotation) is dict else arguments[0]


def _problem(document: Document, detail: ErrorDetails) -> Problem:
    path = tuple(step for step in detail["loc"] if step != "[key]")
    return document.problem(path, _message(path, detail))


def _message(path: tuple[str | int, ...], detail: ErrorDetails) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    key = written_path(path)
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "missing":
        section = section_at(Settings, path[:-1])
        meaning = ""
        if section is not None and (field := section.model_fields.get(str(path[-1]))) is not None:
            meaning = f": {(field.description or '').split(chr(10))[0].rstrip('.')}"
        return f"`{key}` is missing; add it{meaning}"
    if kind == "written":
        message = str(context["message"])
        return f"`{key}`: {message}" if key else message
    if kind in _KINDS:
        advice = (
            "; put it in quotes" if kind == "string_type" and isinstance(value, (int, float, bool)) else ""
        )
        return f"`{key}` must be {_KINDS[kind]}, not `{shown(value)}`{advice}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"`{key}` must be {words} {context[name]:g}, not `{shown(value)}`"
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "`")
        hint = (
            did_you_mean(value, choices.replace("`", "").replace(" or ", ", ").split(", "))
            if isinstance(value, str)
            else ""
        )
        return f"`{key}` must be {choices}, not `{shown(value)}`{hint}"
    if kind == "string_too_short":
        return f"`{key}` is empty; write a name"
    if kind == "string_too_long":
        return f"`{key}` is longer than {context['max_length']} characters; shorten it"
    return f"`{key}`: {detail['msg']}, not `{shown(value)}`"


def _unknown_key(path: tuple[str | int, ...]) -> str:
    key, above = str(path[-1]), written_path(path[:-1])
    section = section_at(Settings, path[:-1])
    known = list(section.model_fields) if section is not None else []
    where = f" in `{above}`" if above else ""
    return f"unknown key `{shown(key)}`{where}{did_you_mean(key, known) or '.'} Keys here: {', '.join(known)}"


def written_path(path: Iterable[str | int]) -> str:
    """``routes[0].match`` for ("routes", 0, "match")."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
