"""The stage of a replay: engines, what the gateway may hear of them and when, and what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from extproc.admission.policy import Policy
from extproc.replay.arrival import Arrival
from extproc.replay.errors import ReplayError
from extproc.replay.faults import Fault
from extproc.simulator.presets import PRESETS
from extproc.simulator.profile import Profile


@dataclass(slots=True, frozen=True)
class Slo:
    """What counts as good service: both must hold."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1
    """Mean seconds per output token after the first."""


@dataclass(slots=True, frozen=True)
class Setup:
    """Everything of a run but the trace and the policy."""

    engines: tuple[Profile, ...]
    scrape_interval_s: float = 1.0
    scrape_lag_s: float = 0.0
    """How old an engine's numbers are when it shows them; the gateway cannot know."""
    record_delay_s: float = 0.02
    """From the end of a request to its access log record."""
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    fallbacks: int = 1
    resolution: int = 64
    """Tokens in a block of the gateway's view of caches."""
    bytes_per_token: float = 4.0
    usage: bool = True
    """Engines report token usage, cached tokens included."""
    slo: Slo = Slo()
    admission: Policy | None = None
    """Lets requests wait in the gateway or refuses them; None: each is sent at once."""


PERTURBATIONS = {
    "attention": "prefill grows with the square of the context: attention costs five times the preset's",
    "interference": "each decoding sequence slows a step ten times as much as the preset says",
    "blocks": "the KV cache is in blocks of 256 tokens",
    "jitter": "each step's time varies by 30 %",
}
"""Changes to the engines that no policy is told of: name -> what it does."""


def resolution_of(arrivals: Sequence[Arrival]) -> int:
    """A block size fine enough for these prompts: a sixteenth of the mean, 64 to 512 tokens. Engines use 16 tokens,
    which costs a replay time and changes little."""
    mean = sum(arrival.prompt_tokens for arrival in arrivals) / len(arrivals)
    return next((size for size in (512, 256, 128) if size <= mean / 16), 64)


def fleet(
    count: int,
    presets: Sequence[str],
    *,
    block_size: int = 64,
    kv_tokens: int | None = None,
    perturb: frozenset[str] = frozenset(),
) -> tuple[Profile, ...]:
    """Profiles of ``count`` engines, the presets dealt out in turn. ``kv_tokens`` replaces the preset's KV size.

    Raises:
        ReplayError: an unknown preset or perturbation, or a size no engine can have.
    """
    if count < 1 or not presets:
        raise ReplayError("there must be at least one engine and one preset")
    unknown = [name for name in presets if name not in PRESETS]
    if unknown:
        raise ReplayError(
            f"no engine preset is called {unknown[0]!r}; there are {', '.join(sorted(PRESETS))}"
        )
    strange = sorted(perturb - PERTURBATIONS.keys())
    if strange:
        raise ReplayError(f"no perturbation is called {strange[0]!r}; there are {', '.join(PERTURBATIONS)}")
    if "blocks" in perturb:
        block_size = 256
    try:
        made = [_engine(PRESETS[name], block_size, kv_tokens, perturb) for name in presets]
    except ValueError as error:
        raise ReplayError(str(error)) from error
    return tuple(made[at % len(made)] for at in range(count))


def _engine(preset: Profile, block_size: int, kv_tokens: int | None, perturb: frozenset[str]) -> Profile:
    tokens = kv_tokens if kv_tokens is not None else preset.kv_blocks * preset.block_size
    profile = replace(preset, block_size=block_size, kv_blocks=tokens // block_size)
    if "attention" in perturb:
        profile = replace(profile, attention_quadratic=profile.attention_quadratic * 5)
    if "interference" in perturb:
        profile = replace(profile, decode_per_seq_s=profile.decode_per_seq_s * 10)
    if "jitter" in perturb:
        profile = replace(profile, jitter=0.3)
    return profile
