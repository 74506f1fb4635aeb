"""One guarded stream of tokens as a state machine without clock: chunks and time in, chunks out.

Rules of this file (bounds of the ticket; a bound that is None never comes):

    state   | event                                   | what goes to the client                      | next
    --------+-----------------------------------------+----------------------------------------------+---------
    WAITING | ``first_s`` after the request was sent  | 504 in place of the held header              | DONE
    WAITING | header, ``first_s`` is set              | nothing: the header is held                  | WAITING
    WAITING | header, ``first_s`` is None             | the header                                   | STREAM
    WAITING | header that is no plain event stream    | nothing: header held, body not looked at     | WAITING
    WAITING | first chunk                             | the held header, the chunk                   | STREAM
    STREAM  | chunk                                   | every event that is whole by now             | STREAM
    STREAM  | ``heartbeat_s`` without a word          | ``: ping``                                   | STREAM
    STREAM  | ``idle_s`` without a chunk, or          | the ending of a reply cut at its token limit,| DONE
            | ``total_s`` after the request was sent  | and the end of the stream                    |
    STREAM  | end of the engine's stream              | the rest                                     | DONE

Events are passed whole, so that a heartbeat or an ending never falls into one; the bytes as a whole stay the engine's own.
An unfinished event larger than ``_LONGEST`` goes on in pieces (no heartbeat or ending until it is over). A reply that is no
plain event stream is passed as it comes: nothing can be put into it. After the engine's own last event nothing is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from extproc.api.sse_ending import ending, finished
from extproc.edge.guard_ticket import GuardTicket

HEARTBEAT = b": ping\n\n"
_LONGEST = 256 * 1024
_ENDS = (b"\n\n", b"\r\n\r\n")


class State(Enum):
    """Where the stream stands; see the head of this file."""

    WAITING = auto()
    STREAM = auto()
    DONE = auto()


@dataclass(slots=True)
class Out:
    """What goes to the client now."""

    header: bool = False
    """Let the held header go."""
    body: bytes = b""
    end: bool = False
    timeout: bool = False
    """Answer 504 in place of the reply."""
    word: str = ""
    """What happened, for metrics: ``first_token_timeout``, ``heartbeat``, ``idle``, ``total``."""


class GuardedStream:
    """See the rules above; ``started`` is when the request was sent. Times are monotonic seconds."""

    def __init__(self, ticket: GuardTicket, started: float) -> None:
        self.state = State.WAITING
        self._ticket = ticket
        self._started = started
        self._heard = started
        self._said = started
        self._held_header = False
        self._plain = True
        self._inside = False
        """A part of an unfinished event is with the client."""
        self._finished = False
        self._rest = b""
        self._first_event = b""

    def header(self, headers: Mapping[str, str], now: float) -> Out:
        """The response header came; ``headers`` with ``:status``."""
        self._plain = (
            headers.get(":status") == "200"
            and headers.get("content-type", "").startswith("text/event-stream")
            and headers.get("content-encoding", "identity") == "identity"
        )
        self._heard = now
        if self._ticket.first_s is not None:
            self._held_header = True
            return Out()
        self.state = State.STREAM
        self._said = now
        return Out(header=True)

    def chunk(self, data: bytes, now: float, *, end: bool) -> Out:
        """A piece of the body came from the engine."""
        if self.state is State.DONE:
            return Out()
        header, self._held_header = self._held_header, False
        if data or end:
            self.state = State.STREAM
        self._heard = now
        body = self._whole(data) if self._plain else data
        if end:
            body, self._rest = body + self._rest, b""
            self.state = State.DONE
        if body or header:
            self._said = now
        return Out(header=header, body=body, end=end)

    def trailers(self) -> Out:
        """The engine's stream ended with trailers: what is held goes first."""
        body, self._rest = self._rest, b""
        header, self._held_header = self._held_header, False
        self.state = State.DONE
        return Out(header=header, body=body)

    def due(self) -> float | None:
        """When :meth:`tick` has something to do at the earliest."""
        ticket = self._ticket
        if self.state is State.DONE:
            return None
        if self.state is State.WAITING:
            return None if ticket.first_s is None else self._started + ticket.first_s
        if not self._plain or self._finished or self._inside:
            return None
        times = [
            *([self._said + ticket.heartbeat_s] if ticket.heartbeat_s is not None else []),
            *([self._heard + ticket.idle_s] if ticket.idle_s is not None else []),
            *([self._started + ticket.total_s] if ticket.total_s is not None else []),
        ]
        return min(times, default=None)

    def tick(self, now: float) -> Out:
        """Time has passed."""
        due = self.due()
        if due is None or now < due:
            return Out()
        ticket = self._ticket
        if self.state is State.WAITING:
            self.state = State.DONE
            return Out(timeout=True, end=True, word="first_token_timeout")
        if ticket.total_s is not None and now >= self._started + ticket.total_s:
            return self._cut("total")
        if ticket.idle_s is not None and now >= self._heard + ticket.idle_s:
            return self._cut("idle")
        self._said = now
        return Out(body=HEARTBEAT, word="heartbeat")

    def _cut(self, word: str) -> Out:
        self.state = State.DONE
        return Out(body=ending(self._ticket.api, self._first_event), end=True, word=word)

    def _whole(self, data: bytes) -> bytes:
        """The events that are whole with this piece; the rest is kept."""
        joined = self._rest + data if self._rest else data
        if joined.endswith(_ENDS):
            cut = len(joined)
        else:
            cut = max(joined.rfind(mark) + len(mark) if mark in joined else 0 for mark in _ENDS)
            if not cut and len(joined) > _LONGEST:
                self._inside, self._rest = True, b""
                return joined
        whole, self._rest = joined[:cut], joined[cut:]
        if whole:
            self._inside = False
            if not self._first_event and b"data:" in whole:
                self._first_event = whole[whole.index(b"data:") :].partition(b"\n\n")[0]
            self._finished = self._finished or finished(whole)
        return whole
