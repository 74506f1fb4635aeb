"""LoRA adapters of an engine: a few are resident, those in use cannot be displaced, loading costs time."""

from __future__ import annotations

from collections import OrderedDict


class AdapterSlots:
    """Resident adapters in order of last use."""

    __slots__ = ("_users", "load_s", "slots")

    def __init__(self, slots: int, load_s: float) -> None:
        self.slots = slots
        self.load_s = load_s
        self._users: OrderedDict[str, int] = OrderedDict()

    @property
    def running(self) -> tuple[str, ...]:
        """Adapters that running sequences use, sorted."""
        return tuple(sorted(name for name, users in self._users.items() if users))

    @property
    def resident(self) -> tuple[str, ...]:
        """Adapters that need no loading, sorted."""
        return tuple(sorted(self._users))

    def admits(self, name: str) -> bool:
        """Whether a sequence with this adapter may start now."""
        return name in self._users or len(self._users) < self.slots or not all(self._users.values())

    def take(self, name: str) -> float:
        """One more sequence uses ``name``. Returns the seconds its loading costs; 0 when it is resident."""
        load_s = 0.0
        if name not in self._users:
            load_s = self.load_s
            if len(self._users) >= self.slots:
                del self._users[next(other for other, users in self._users.items() if not users)]
            self._users[name] = 0
        self._users[name] += 1
        self._users.move_to_end(name)
        return load_s

    def give_back(self, name: str) -> None:
        """One sequence less uses ``name``; it stays resident until displaced."""
        self._users[name] -= 1
