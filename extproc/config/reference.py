"""docs/configuration.md, rendered from the schema.

``python -m extproc.config.reference`` writes it; with ``--check`` it only compares, and exits with 1 when
they differ.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from extproc.config.schema import Settings
from extproc.config.schema.base import Section, Written
from extproc.config.schema.settings import START_ONLY
from extproc.config.validation import section_of
from extproc.scheduling import registry

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"

_HEAD = """\
# Configuration

<!-- Written by `python -m extproc.config.reference` from extproc/config/schema/; edit there. -->

Two files, watched as one: `envoy/clusters.yaml` says which engines there are (plain Envoy clusters with a
line of metadata each), `extproc.yaml` what is done with them. A running extproc takes a good pair whole and
at once; on a bad one it keeps what it has, logs why and counts it. `extproc check` says the same before, as
`file:line: what is wrong, what to write instead`.

- Durations are written `500ms`, `1s`, `10m`, `1h`, or as a number of seconds.
- Sizes are written `64MiB`, `512KiB`, or as a number of bytes.
- Relative paths are meant from the folder of `extproc.yaml`.
- Addresses are `HOST:PORT` (IPv6 in brackets) or `unix:PATH`.
- Unknown and duplicate keys are errors. Only `true` and `false` are booleans. Merge keys (`<<`) are not
  understood; anchors and aliases are.
- Sections and keys that say *Taken at start* keep the values they had when extproc started; a change needs a
  restart. All others follow the file while extproc runs.
"""

_AT_START = " *Taken at start.*"

_EXAMPLE = """\
## Example

```yaml
pools:
  llama:
    aliases: {gpt-4o-mini: llama-3-8b}
routes:
- name: free-tier
  match: {model: [llama-3-8b], header: {X-Tenant-Tier: free}}
  pool: llama
  strategy: round-robin
  weights: {v1: 90, v2: 10}
responses: {headers: true}
```
"""


def render() -> str:
    """The whole document."""
    strategies = ", ".join(f"`{name}`" for name in sorted(registry.NAMES))
    parts = [_HEAD, _EXAMPLE, f"Strategies: {strategies}.\n", *_sections(Settings, "")]
    return "\n".join(parts)


def _sections(model: type[Section], key: str) -> Iterator[str]:
    """The table of one model, then those of the models below it."""
    title = f"## `{key}`" if key else "## Top level"
    at_start = any(key == name or key.startswith(f"{name}.") for name in START_ONLY)
    lines = [title, "", " ".join((model.__doc__ or "").split()) + (_AT_START if at_start else ""), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    below: list[tuple[type[Section], str]] = []
    for name, field in model.model_fields.items():
        inner, suffix = _inner(field.annotation)
        path = f"{key}.{name}{suffix}" if key else f"{name}{suffix}"
        if inner is not None:
            below.append((inner, path))
        meaning = " ".join((field.description or "").split())
        if (f"{key}.{name}" if key else name) in START_ONLY:
            meaning += _AT_START
        lines.append(
            f"| `{name}` | {_type(field, path)} | {_default(field)} | {meaning} |".replace("|  |", "| |")
        )
    yield "\n".join(lines) + "\n"
    for inner, path in below:
        yield from _sections(inner, path)


def _inner(annotation: Any) -> tuple[type[Section] | None, str]:
    """The section that a field holds, and what its path ends with: ``.NAME`` in a mapping, ``[]`` in a "
    "list."""
    annotation, suffix = section_of(annotation), ""
    if get_origin(annotation) is dict:
        annotation, suffix = section_of(get_args(annotation)[1]), ".NAME"
    elif get_origin(annotation) is tuple:
        annotation, suffix = section_of(get_args(annotation)[0]), "[]"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, suffix
    return None, ""


def _type(field: FieldInfo, path: str) -> str:
    inner, suffix = _inner(field.annotation)
    if inner is not None:
        anchor = path.lower().replace(".", "").replace("[]", "")
        kind = {"": "section", ".NAME": "name: section", "[]": "list of sections"}[suffix]
        return f"[{kind}](#{anchor})"
    text = _plain_type(field.annotation, field.metadata)
    bounds = [
        f"{sign} {value:g}"
        for item in field.metadata
        for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if (value := getattr(item, attribute, None)) is not None
    ]
    return ", ".join([text, *bounds])


def _plain_type(annotation: Any, metadata: Any = ()) -> str:
    written = next((item for item in metadata if isinstance(item, Written)), None)
    if written is not None:
        return written.name
    for part in get_args(annotation):
        if part is type(None):
            rest = next(other for other in get_args(annotation) if other is not type(None))
            return f"{_plain_type(rest)} or null"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plain_type(arguments[0], arguments[1:])
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin is dict:
        return f"mapping of name: {_plain_type(arguments[1])}"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(
        annotation, "any value"
    )


def _default(field: FieldInfo) -> str:
    inner, suffix = _inner(field.annotation)
    if field.is_required():
        return "**required**"
    default = field.get_default(call_default_factory=True)
    if default is None or default is PydanticUndefined:
        return "`null`"
    if inner is not None and not suffix:
        return ""
    if default in ((), {}, ""):
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    show = _shower(field.annotation, field.metadata)
    return f"`{show(default)}`"


def _shower(annotation: Any, metadata: Any) -> Any:
    written = next((item for item in metadata if isinstance(item, Written)), None)
    if written is not None:
        return written.show
    for part in get_args(annotation):
        if get_origin(part) is Annotated:
            return _shower(get_args(part)[0], get_args(part)[1:])
    return lambda value: f"{value:g}" if isinstance(value, float) else str(value)


def main(arguments: list[str]) -> int:
    """Write the document, or compare with ``--check``; the exit code."""
    text = render()
    if "--check" not in arguments:
        DOCUMENT.write_text(text)
        return 0
    present = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    if present == text:
        return 0
    difference = difflib.unified_diff(
        present.splitlines(), text.splitlines(), "docs/configuration.md", "the schema", lineterm="", n=0
    )
    print("\n".join(difference))
    print("docs/configuration.md is not what the schema says; run `python -m extproc.config.reference`")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
