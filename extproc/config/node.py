"""A cursor on an Envoy configuration: values by field name in either spelling, absent ones included, with
their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from extproc.config.envoy_message import field
from extproc.config.problem import Problem
from extproc.config.yaml_source import Document, NodePath

_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)s")


@dataclass(slots=True, frozen=True)
class Node:
    """One value; ``value`` None where the file says nothing. Problems then name the nearest line above."""

    document: Document
    path: NodePath
    value: Any

    def at(self, *names: str) -> Node:
        """The node below, by field names."""
        path, value = self.path, self.value
        for name in names:
            key, value = field(value, name)
            path = (*path, key)
        return Node(self.document, path, value)

    def items(self) -> list[Node]:
        """The nodes of a list; none where there is no list."""
        if not isinstance(self.value, list):
            return []
        return [Node(self.document, (*self.path, index), item) for index, item in enumerate(self.value)]

    def typed(self, suffix: str) -> Iterator[Node]:
        """Every mapping at or below this one whose ``@type`` ends with ``suffix``, in the order of the
        file."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if isinstance(node.value, dict):
                if str(node.value.get("@type", "")).endswith(suffix):
                    yield node
                below = [Node(self.document, (*node.path, key), item) for key, item in node.value.items()]
                waiting.extend(reversed(below))
            else:
                waiting.extend(reversed(node.items()))

    def __bool__(self) -> bool:
        return self.value is not None

    @property
    def text(self) -> str:
        """The value as text; empty where there is none."""
        return "" if self.value is None else str(self.value)

    @property
    def number(self) -> float | None:
        """The value as a number (Envoy takes numbers as text too), also inside ``{value: …}``."""
        value = self.value.get("value") if isinstance(self.value, dict) else self.value
        if value is None or isinstance(value, bool):
            return None
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            return None

    @property
    def seconds(self) -> float | None:
        """The value as a duration; None where there is none that Envoy would understand."""
        found = _SECONDS.fullmatch(self.text)
        return float(found[1]) if found else None

    @property
    def true(self) -> bool:
        """Whether the value is true, also inside ``{value: …}``."""
        value = self.value.get("value") if isinstance(self.value, dict) else self.value
        return value is True

    def problem(self, message: str, *, fatal: bool = True) -> Problem:
        """A problem at this node's line."""
        return self.document.problem(self.path, message, fatal=fatal)
