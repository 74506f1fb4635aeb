"""Tokens that a request really used, for settlement.

Rules of this file:

- usage, where the engine reported it;
- else, for a reply of which bytes came: the prompt's estimate, and the reply's bytes over the bytes of a token, learnt
  from replies with usage (streamed ones apart: an event for each token is many times its text);
- before anything was learnt: the estimate that was reserved for the output.
"""

from __future__ import annotations

from collections import OrderedDict

from extproc.outcome import Usage

_MEMORY = 0.98
_ENOUGH = 3
_MAX_MODELS = 1000


class ReplySizes:
    """Bytes of a reply's token, by model and by whether it was streamed. Capped; the longest unused model goes."""

    def __init__(self) -> None:
        self._sums: OrderedDict[tuple[str, bool], list[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sums)

    def observe(self, model: str, stream: bool, size: int, output_tokens: int) -> None:
        """A whole reply of ``size`` bytes had so many tokens."""
        if size <= 0 or output_tokens <= 0:
            return
        sums = self._sums.setdefault((model, stream), [0.0, 0.0, 0.0])
        self._sums.move_to_end((model, stream))
        sums[0] = sums[0] * _MEMORY + size
        sums[1] = sums[1] * _MEMORY + output_tokens
        sums[2] = sums[2] * _MEMORY + 1.0
        if len(self._sums) > _MAX_MODELS:
            self._sums.popitem(last=False)

    def tokens(self, model: str, stream: bool, size: int) -> float | None:
        """Tokens in a reply of ``size`` bytes; None before enough replies have been seen."""
        sums = self._sums.get((model, stream))
        if sums is None or sums[2] < _ENOUGH * 0.9:
            return None
        return size * sums[1] / sums[0]

    def state(self) -> list[tuple[str, bool, list[float]]]:
        """What was learnt, to be written down."""
        return [(model, stream, list(sums)) for (model, stream), sums in self._sums.items()]

    def restore(self, state: list[tuple[str, bool, list[float]]]) -> None:
        """What :meth:`state` gave, before a restart."""
        for model, stream, sums in state[-_MAX_MODELS:]:
            self._sums[model, stream] = sums


def used_tokens(
    usage: Usage | None, *, prompt_tokens: float, output_tokens: float, reply_tokens: float | None
) -> float:
    """Tokens of a served request. ``prompt_tokens`` and ``output_tokens`` are the estimates; ``reply_tokens`` is what
    the reply's bytes say."""
    prompt = prompt_tokens
    output = output_tokens if reply_tokens is None else reply_tokens
    if usage is not None:
        prompt = usage.input if usage.input is not None else prompt
        output = usage.output if usage.output is not None else output
    return prompt + output
