"""YAML text -> plain data that remembers its lines. For files that people and Envoy read.

Rules of this file:

- one document, a mapping at its root; an empty file is an empty mapping;
- keys are always strings, as written; values follow YAML 1.2: only true/false are booleans, ``on``, ``yes``,
  ``1:30``, ``010`` and dates stay strings, ``null`` and ``~`` are null;
- duplicate keys, merge keys (``<<``, which Envoy does not know), keys that are no scalars and tags other than
  the standard ones are problems; anchors and aliases are fine, within caps that stop a small file from
  becoming a huge tree;
- built from parser events with a stack of our own, so that deep nesting ends at our cap and not in the
  interpreter's;
- nothing but ConfigError is ever raised for a bad text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from extproc.config.problem import ConfigError, Problem

MAX_CHARACTERS = 16 * 1024 * 1024
MAX_DEPTH = 64
MAX_ALIASES = 20_000
MAX_NODES = 1_000_000
"""Nodes of the tree after aliases are expanded; 2,000 Envoy clusters written out need about 200,000."""
MAX_PROBLEMS = 100

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,30})|0x[0-9a-fA-F]{1,30}|0o[0-7]{1,30}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]{1,30}|[0-9]{1,30}(?:\.[0-9]{0,30})?)(?:[eE][-+]?[0-9]{1,3})?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: dict[str, object] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_STANDARD_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq")
)
_STRING_TAGS = frozenset({"!", "tag:yaml.org,2002:str"})

NodePath = tuple[str | int, ...]


@dataclass(slots=True)
class LineNode:
    """Line of one node (that of its key, inside a mapping) and the nodes below it."""

    line: int
    children: dict[str | int, LineNode] = field(default_factory=dict)
    size: int = 1
    """Nodes in this subtree, itself included."""
    height: int = 1
    """Levels of this subtree, itself included."""


@dataclass(slots=True, frozen=True)
class Document:
    """One YAML file: ``data`` is dicts, lists and scalars, and may be changed (aliased parts are copies)."""

    file: str
    data: dict[str, Any]
    lines: LineNode = field(default_factory=lambda: LineNode(1))

    def line(self, path: NodePath) -> int:
        """Line, from 1, of the node at ``path`` (keys and list positions), or of its nearest ancestor."""
        node = self.lines
        for step in path:
            child = node.children.get(step)
            if child is None:
                break
            node = child
        return node.line

    def problem(self, path: NodePath, message: str, *, fatal: bool = True) -> Problem:
        """A problem at the line of ``path``."""
        return Problem(self.file, self.line(path), message, fatal)


def read(text: str, file: str) -> Document:
    """Read YAML. ``file`` is the name that problems carry.

    Raises:
        ConfigError: with every duplicate key and other fault up to the first syntax error.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            [Problem(file, 0, f"the file is larger than {MAX_CHARACTERS} characters; split it")]
        )
    builder = _Builder(file)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except _Stop:
        pass
    except yaml.MarkedYAMLError as error:
        builder.report(*_syntax(error, text))
    except yaml.reader.ReaderError as error:
        before = text.encode(errors="replace")[: error.position]
        builder.report(before.count(b"\n") + 1, f"not readable as YAML: {error.reason}; remove the character")
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError) as error:
        builder.report(0, f"not readable as YAML: {error}")
    if builder.problems:
        raise ConfigError(builder.problems)
    return Document(file, builder.root, builder.root_lines)


def read_file(path: Path, name: str | None = None) -> Document:
    """Read the YAML file at ``path``; ``name`` (default: the path as given) is what problems carry.

    Raises:
        ConfigError: also when the file cannot be opened or is not UTF-8.
    """
    file = str(path) if name is None else name
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([Problem(file, 0, f"cannot be read: {error.strerror or error}")]) from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ConfigError([Problem(file, line, "is not UTF-8 text; save the file as UTF-8")]) from error
    return read(text, file)


def _syntax(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str]:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 0
    message = f"not valid YAML: {error.problem or error.context or error}"
    if error.context and error.problem:
        message += f" ({error.context})"
    lines = text.splitlines()
    if 0 < line <= len(lines) and "\t" in lines[line - 1]:
        message += "; the line holds a tab: indent with spaces"
    return line, message


class _Stop(Exception):
    """Enough is known: reading on would only cost."""


@dataclass(slots=True)
class _Open:
    """A mapping or list whose end has not come."""

    value: dict[str, Any] | list[Any]
    lines: LineNode
    anchor: str | None
    key: str | None = None
    """Of a mapping: the key whose value is awaited."""
    key_line: int = 0
    skip: bool = False
    """The value awaited belongs to a key that was refused."""


class _Builder:
    """Turns parser events into data and lines."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.root: dict[str, Any] = {}
        self.root_lines = LineNode(1)
        self._stack: list[_Open] = []
        self._anchors: dict[str, tuple[Any, LineNode]] = {}
        self._documents = 0
        self._aliases = 0
        self._nodes = 0

    def report(self, line: int, message: str) -> None:
        self.problems.append(Problem(self.file, line, message))
        if len(self.problems) >= MAX_PROBLEMS:
            raise _Stop

    def take(self, event: Any) -> None:
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event, event.start_mark.line + 1)

    def _document(self, event: Any, line: int) -> None:
        self._documents += 1
        if self._documents > 1:
            self._fail(line, "a second YAML document begins here; write one document a file")
        self._anchors.clear()

    def _scalar(self, event: Any, line: int) -> None:
        parent = self._stack[-1] if self._stack else None
        if parent is not None and isinstance(parent.value, dict) and parent.key is None:
            self._key(parent, event, line)
            return
        self._count(1, line)
        value: object = event.value
        tag = event.tag
        if tag is not None and tag != "!" and tag not in _STANDARD_TAGS:
            self.report(line, f"tag `{tag}` is not understood; remove it")
        elif tag not in _STRING_TAGS and (event.implicit[0] or tag is not None):
            value = _plain(event.value)
        if parent is None and value is None:
            return
        self._place(value, LineNode(line), event.anchor, line)

    def _key(self, parent: _Open, event: Any, line: int) -> None:
        key: str = event.value
        parent.key, parent.key_line, parent.skip = key, line, False
        if event.anchor is not None:
            self._anchors[event.anchor] = (key, LineNode(line))
        if key == "<<" and event.implicit[0]:
            self.report(line, "merge keys (`<<`) are not understood here nor by Envoy; write the keys out")
            parent.skip = True
        elif key in parent.value:
            first = parent.lines.children[key].line
            self.report(line, f"duplicate key `{key[:80]}` (first on line {first}); keep one of them")
            parent.skip = True

    def _begin(self, event: Any, line: int) -> None:
        parent = self._stack[-1] if self._stack else None
        if parent is not None and isinstance(parent.value, dict) and parent.key is None:
            self._fail(
                line, "a key must be plain text, not a mapping or list; quote it if it begins with { or ["
            )
        self._deepen(1, line)
        if event.tag is not None and event.tag != "!" and event.tag not in _STANDARD_TAGS:
            self.report(line, f"tag `{event.tag}` is not understood; remove it")
        self._count(1, line)
        value: dict[str, Any] | list[Any] = {} if isinstance(event, MappingStartEvent) else []
        self._stack.append(_Open(value, LineNode(line), event.anchor))

    def _end(self, event: Any, line: int) -> None:
        done = self._stack.pop()
        self._place(done.value, done.lines, done.anchor, done.lines.line)

    def _alias(self, event: Any, line: int) -> None:
        self._aliases += 1
        if self._aliases > MAX_ALIASES:
            self._fail(line, f"more than {MAX_ALIASES} aliases; write the values out")
        found = self._anchors.get(event.anchor)
        if found is None:
            self._fail(
                line,
                f"alias `*{event.anchor}` names no finished anchor; define `&{event.anchor}` before it",
            )
            return
        value, lines = found
        parent = self._stack[-1] if self._stack else None
        if parent is not None and isinstance(parent.value, dict) and parent.key is None:
            self._fail(line, "an alias cannot be a key; write the key out")
        self._count(lines.size, line)
        self._deepen(lines.height, line)
        self._place(_copy(value), lines, None, line)

    def _place(self, value: Any, lines: LineNode, anchor: str | None, line: int) -> None:
        """Put a finished node into its parent."""
        if anchor is not None:
            self._anchors[anchor] = (value, lines)
        if not self._stack:
            if isinstance(value, dict):
                self.root, self.root_lines = value, lines
            else:
                self._fail(line, "the file must hold keys with values (`key: value`)")
            return
        parent = self._stack[-1]
        parent.lines.size += lines.size
        parent.lines.height = max(parent.lines.height, lines.height + 1)
        if isinstance(parent.value, list):
            parent.lines.children[len(parent.value)] = lines
            parent.value.append(value)
            return
        if parent.key is not None and not parent.skip:
            parent.value[parent.key] = value
            parent.lines.children[parent.key] = LineNode(
                parent.key_line, lines.children, lines.size, lines.height
            )
        parent.key = None

    def _count(self, nodes: int, line: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            self._fail(line, f"more than {MAX_NODES} values once aliases are expanded; make the file smaller")

    def _deepen(self, levels: int, line: int) -> None:
        if len(self._stack) + levels > MAX_DEPTH:
            self._fail(line, f"nested deeper than {MAX_DEPTH} levels; flatten the file")

    def _fail(self, line: int, message: str) -> None:
        self.report(line, message)
        raise _Stop


_HANDLERS: dict[type, Callable[[_Builder, Any, int], None]] = {
    DocumentStartEvent: _Builder._document,
    ScalarEvent: _Builder._scalar,
    AliasEvent: _Builder._alias,
    MappingStartEvent: _Builder._begin,
    SequenceStartEvent: _Builder._begin,
    MappingEndEvent: _Builder._end,
    SequenceEndEvent: _Builder._end,
}


def _plain(text: str) -> object:
    """The value of an unquoted scalar (YAML 1.2 core schema, without octal-looking decimals)."""
    if text in _WORDS:
        return _WORDS[text]
    if not (text[0].isascii() and (text[0].isdigit() or text[0] in "+-.")):
        return text
    if _INT.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text) and not text.lstrip("+-").isdigit():
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _copy(value: Any) -> Any:
    """A deep copy, so that changing one use of an anchor changes no other."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value
