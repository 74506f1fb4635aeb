"""Other gateways' policies, each faithful to its published algorithm, on the one strategy interface.

They get the core's view of caches for their matches, so that formulas are compared and not indexes; a peer whose own
index works in another way brings it along. Those that read responses in their own process hear of first tokens at
once (``in_flight``). random, round-robin, least-requests, power-of-two-choices and consistent-hash are strategies of
our own too and are not repeated here.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from extproc.replay.peers.aibrix_prefix import AibrixPrefix
from extproc.replay.peers.dynamo_kv import DynamoKv
from extproc.replay.peers.llmd_token_aware import LlmdTokenAware
from extproc.replay.peers.llmd_weighted import LlmdWeighted
from extproc.replay.peers.longest_match import LongestMatch
from extproc.replay.peers.production_stack_trie import ProductionStackTrie
from extproc.replay.peers.sglang_threshold import SglangThreshold
from extproc.scheduling.options import Options
from extproc.scheduling.strategy import Strategy

PEERS: dict[str, Callable[[Options, random.Random], Strategy]] = {
    "longest-match": lambda options, rng: LongestMatch(),
    "sglang-threshold": lambda options, rng: SglangThreshold(
        options.number("threshold", 0.3, high=1.0),
        options.number("absolute", 64.0),
        options.number("relative", 1.5),
    ),
    "llmd-weighted": lambda options, rng: LlmdWeighted(
        rng, options.number("queue", 2.0), options.number("kv", 2.0), options.number("prefix", 3.0)
    ),
    "llmd-token-aware": lambda options, rng: LlmdTokenAware(
        rng,
        options.number("affinity", 0.8, high=1.0),
        options.number("penalty_s", 18.0),
        options.number("peak_tokens_per_s", 15_928.0, low=1.0),
    ),
    "dynamo-kv": lambda options, rng: DynamoKv(
        rng, options.number("overlap_credit", 1.0), options.number("prefill_scale", 1.0)
    ),
    "aibrix-prefix": lambda options, rng: AibrixPrefix(
        rng, options.number("imbalance", 8.0), options.number("deviations", 1.0)
    ),
    "production-stack-trie": lambda options, rng: ProductionStackTrie(rng),
}
