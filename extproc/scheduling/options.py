"""Reading a strategy's options from the configuration: every option is typed, bounded and known, or it is an
error."""

from __future__ import annotations

from collections.abc import Mapping


class Options:
    """The options of one strategy. Readers take what they know; :meth:`finish` refuses what nobody took.

    All readers raise ``ValueError`` with the strategy's and the option's name.
    """

    __slots__ = ("_left", "_strategy")

    def __init__(self, strategy: str, options: Mapping[str, object]) -> None:
        self._strategy = strategy
        self._left = dict(options)

    def number(self, name: str, default: float, *, low: float = 0.0, high: float = float("inf")) -> float:
        """A finite number within ``low``..``high``."""
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ValueError(
                f"strategy {self._strategy}: {name} must be a number from {low:g} to {high:g}, not {value!r}"
            )
        return float(value)

    def word(self, name: str, default: str) -> str:
        """A string."""
        value = self._left.pop(name, default)
        if not isinstance(value, str):
            raise ValueError(f"strategy {self._strategy}: {name} must be a word, not {value!r}")
        return value

    def table(self, name: str) -> dict[str, object]:
        """A mapping with string keys; empty when not given."""
        value = self._left.pop(name, {})
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"strategy {self._strategy}: {name} must be a mapping, not {value!r}")
        return dict(value)

    def weights(self, name: str) -> dict[str, float]:
        """A mapping of names to numbers that are not negative."""
        weights: dict[str, float] = {}
        for key, value in self.table(name).items():
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value < float("inf")
            ):
                raise ValueError(
                    f"strategy {self._strategy}: {name}.{key} must be a number >= 0, not {value!r}"
                )
            weights[key] = float(value)
        return weights

    def finish(self) -> None:
        """Refuse options that no reader took."""
        if self._left:
            names = ", ".join(sorted(self._left))
            raise ValueError(f"strategy {self._strategy} has no option {names}")
