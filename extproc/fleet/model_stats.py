"""What we have learnt of each model from usage reports: bytes of prompt in a token, and how long answers get.

Rules of this file: a model starts from the priors and moves towards what usage says, a step of 1/n for the
first samples and of 1/64 from then on; absurd reports are clipped; at most ``max_models`` names are kept, the
longest unused goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from extproc.fleet.prefill import AttentionShare

_PRIOR_WEIGHT = 4
_MEMORY = 64


@dataclass(slots=True)
class _Model:
    bytes_per_token: float
    output_tokens: float
    prompts: int = _PRIOR_WEIGHT
    answers: int = _PRIOR_WEIGHT


class ModelStats:
    """Learned numbers by model name. Unknown models have the priors."""

    def __init__(
        self, *, bytes_per_token: float = 4.0, output_tokens: float = 256.0, max_models: int = 1000
    ) -> None:
        self._prior_bytes = bytes_per_token
        self._prior_output = output_tokens
        self._max_models = max_models
        self._models: OrderedDict[str, _Model] = OrderedDict()
        self._attention: dict[str, AttentionShare] = {}

    def __len__(self) -> int:
        return len(self._models)

    def attention(self, pool: str) -> AttentionShare:
        """What attention adds to the prefill of a pool's model. Pools are few: they are configured."""
        found = self._attention.get(pool)
        if found is None:
            found = self._attention[pool] = AttentionShare()
        return found

    def bytes_per_token(self, model: str) -> float:
        """Prompt bytes (as in ``Prompt.size``) that make one token."""
        known = self._models.get(model)
        return known.bytes_per_token if known else self._prior_bytes

    def prompt_tokens(self, model: str, size: int, token_ids: int | None = None) -> int:
        """Tokens of a prompt of this size; exact when the client sent token ids."""
        return token_ids if token_ids is not None else round(size / self.bytes_per_token(model))

    def output_tokens(self, model: str, max_tokens: int | None = None) -> int:
        """Expected output tokens: the learned mean, but never more than the client allows."""
        known = self._models.get(model)
        mean = known.output_tokens if known else self._prior_output
        return max(round(mean if max_tokens is None else min(mean, max_tokens)), 0)

    def observe(
        self,
        model: str,
        *,
        prompt_bytes: int = 0,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Usage of one finished request. Leave out what was not reported; ``prompt_bytes`` of 0 is not
        known."""
        entry = self._entry(model)
        if prompt_tokens and prompt_bytes >= 64:
            # Chat templates add tokens that are not in the bytes; a media part is many tokens in few bytes.
            ratio = min(max(prompt_bytes / prompt_tokens, 0.5), 16.0)
            entry.prompts = min(entry.prompts + 1, _MEMORY)
            entry.bytes_per_token += (ratio - entry.bytes_per_token) / entry.prompts
        if output_tokens is not None and output_tokens >= 0:
            entry.answers = min(entry.answers + 1, _MEMORY)
            entry.output_tokens += (min(output_tokens, 1_000_000) - entry.output_tokens) / entry.answers

    def state(self) -> dict[str, tuple[float, float, int, int]]:
        """What was learnt, to be written down."""
        return {
            name: (known.bytes_per_token, known.output_tokens, known.prompts, known.answers)
            for name, known in self._models.items()
        }

    def restore(self, state: Mapping[str, tuple[float, float, int, int]]) -> None:
        """What :meth:`state` gave, before a restart. Nonsense is left out."""
        for name, (size, tokens, prompts, answers) in state.items():
            if 0.5 <= size <= 16.0 and 0.0 <= tokens <= 1e6 and len(self._models) < self._max_models:
                self._models[name] = _Model(
                    size, tokens, min(max(prompts, 1), _MEMORY), min(max(answers, 1), _MEMORY)
                )

    def _entry(self, model: str) -> _Model:
        entry = self._models.get(model)
        if entry is None:
            entry = self._models[model] = _Model(self._prior_bytes, self._prior_output)
            if len(self._models) > self._max_models:
                self._models.popitem(last=False)
        else:
            self._models.move_to_end(model)
        return entry
