"""A replica that was slow, in virtual time and without any metrics: it is avoided, tried now and then, and trusted again."""

from __future__ import annotations

from collections import Counter

from tests.unit.core_parts import core, end, request, spec

PROMPT_TOKENS = 1000
RATE = 8000.0
SLOW = 5.0


def test_at_light_load_it_is_hardly_asked_and_gets_its_share_back_within_two_minutes() -> None:
    specs = [spec(f"replica-{number}", port=8000 + number) for number in range(4)]
    fleet = core(specs, strategy="expected-latency")
    now, number = 1.0, 0

    def serve_for(seconds: float, slowness: float) -> Counter[str]:
        """One request after the other; who got how many."""
        nonlocal now, number
        counts: Counter[str] = Counter()
        until = now + seconds
        while now < until:
            number += 1
            asked = request(f"r{number}", f"{number:08}" * (PROMPT_TOKENS // 2))
            decision = fleet.dispatcher.decide(asked, now)
            chosen = decision.choices[0].endpoint.spec  # type: ignore[union-attr]
            counts[chosen.cluster] += 1
            ttft = 0.02 + PROMPT_TOKENS / RATE * (slowness if chosen.cluster == "replica-2" else 1.0)
            now += ttft + 0.2
            fleet.take(end(asked.id, chosen, ttft_s=ttft, engine_s=ttft + 0.2, usage=None), now)
            fleet.housekeep(now)
        return counts

    serve_for(30.0, SLOW)
    slow = serve_for(300.0, SLOW)
    assert 1 <= slow["replica-2"] <= 0.02 * slow.total(), "one try a minute or two"
    serve_for(120.0, 1.0)
    well = serve_for(60.0, 1.0)
    assert well["replica-2"] >= 0.2 * well.total()
