"""Words of the command line that name something and set numbers of it: ``slow:engine=3:factor=5``.

Rules of this file: every number has a largest value, so that no word makes a replay endless; a number is given once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from extproc.replay.errors import ReplayError


def name_and_numbers(
    words: str, what: str, names: Collection[str], most: Mapping[str, float]
) -> tuple[str, dict[str, float]]:
    """Read ``NAME[:key=value…]``. ``what`` it is, for messages; ``most``: key -> its largest value; the smallest is 0.

    Raises:
        ReplayError: another name or key, a key given twice, or a value out of range.
    """
    name, *pairs = words.split(":")
    if name not in names:
        raise ReplayError(f"{what} {words!r}: the name is one of {', '.join(names)}")
    values: dict[str, float] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in most or key in values:
            why = "is given twice" if key in values else f"is not one of {', '.join(most)}"
            raise ReplayError(f"{what} {words!r}: {key!r} {why}")
        try:
            values[key] = float(value)
        except ValueError:
            raise ReplayError(f"{what} {words!r}: {key} must be a number, not {value!r}") from None
        if not 0 <= values[key] <= most[key]:
            raise ReplayError(f"{what} {words!r}: {key} must be a number from 0 to {most[key]:g}")
    return name, values
