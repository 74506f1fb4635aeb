"""Make docs/policies.md and its plots from the results of loadtest/grid.py.

python -m loadtest.policies_page grid.json docs
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from extproc.replay.plots import COLOURS, Bar, bars
from extproc.replay.policies import COMPARED, DEFAULT

NEAR = 1.03
KEY = "ttft_p90_s"
Rows = Mapping[str, Sequence[Mapping[str, Any]]]

HEAD = """# Which policy, by numbers

Every row below is the same traffic, replayed through the code that serves production against simulated engines
(`extproc replay`, see [replay.md](replay.md)), once for each policy. Made by `make policies`; the numbers are the
machine's, no line is edited.

Engines are Llama 3.1 8B on H100 (computed from data sheets, `extproc/simulator/presets.py`). Nobody tells a policy how fast
they are: all begin with empty caches and priors, and see what they would see in production. Our own policy hears of a first
token when the request ends and from a scrape a second; peers whose gateways read the response stream hear of it at once.
Loads are shares of what the same engines do under least-requests when all requests are there at once.

| word | meaning |
|---|---|
| KV ample, starved | 1,000,000 and 160,000 tokens an engine (the first is more than an 80 GB card holds at 16 bits) |
| conversation | parts of a block-hash trace of real conversations; other names are built-in workloads |
| lag | scrapes every 5 s of numbers that are 5 s old |
| mixed | every second engine is an A100 |
| slow node | one engine takes four times as long in the middle half of the replay |
| dead node | one engine is gone in the middle half, and comes back with an empty cache |
| stalls | every engine hangs for three seconds, twice, whenever it may be |
| perturbed | attention five times and decoding ten times as dear, 256-token KV blocks, 30 % jitter of each step |
"""

CAUSES = {
    "lora, 128 engines": "the whole run lasts ten seconds: every adapter is loaded for the first time, and counted in full",
    "perturbed": "step times vary by a third: who sees first tokens knows what nobody can foretell",
    "stalls": "a hang is seen at the next scrape, by who sees tokens at once",
    "lag": "what engines show is five to ten seconds old",
    "lora": "a place for an adapter is free when its last request ends, which is heard of late",
    "starved": "memory decides when a request starts: tokens in use say more than the work ahead",
    "2 engines": "one long prompt is half of the fleet: few decisions, much chance",
    "": "first tokens seen at once against first tokens told afterwards; streams count a little too",
}
"""Word in a cell's name -> why a peer may be first there; the first that fits counts."""

NOTES = """
## Reading it

- **Where peers win**, they win by knowing at once that a first token has come. A gateway that lets no response byte
  through its own process hears of it up to a scrape later and has to estimate in between; on the other hand it costs
  nothing per token. The estimate is good to milliseconds where prompts take what they should, and less good where
  each step varies by a third (perturbed). With KV events, which are not replayed here, it hears of it in milliseconds too.
- **Beginnings count here.** A replay lasts ten seconds to some minutes, and our policy learns how fast the engines are in
  the first of them (a running gateway keeps that over restarts); policies that count requests or tokens need not.
- **Hits are not the goal.** Policies that follow matches above all (longest match, the trie, thresholds) have the
  highest hit ratio in some rows and the longest queues in the same rows: a hot prefix is worth a second copy once
  waiting costs more than computing it again.
- **Load alone is not enough either.** Least requests, round robin and the like compute every conversation anew on
  every replica: under multi-turn traffic they need several times the engines for the same latency.
- **Scrapes as load** (weighted blend) fail with their age: between two scrapes everybody sees the same idle engine.
"""


T_95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36)
"""Student's t for a 95 % interval, by degrees of freedom."""


def beyond(name: str) -> bool:
    """Whether a cell is beyond capacity: some requests are refused there, so latency says little."""
    return "120%" in name


def mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Over the seeds, geometric for times; infinite where nothing was served."""
    values = [row[key] for row in rows if row[key] is not None]
    if not values:
        return math.inf
    return geometric(values) if key.endswith("_s") else sum(values) / len(values)


def behind(
    own: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> tuple[float, float, float]:
    """p90 TTFT over another's on the same seeds: geometric mean, and the ends of its 95 % interval."""
    logs = [math.log(a[KEY] / b[KEY]) for a, b in zip(own, other, strict=False)]
    middle = sum(logs) / len(logs)
    if len(logs) < 2:
        return math.exp(middle), 0.0, math.inf
    error = math.sqrt(sum((log - middle) ** 2 for log in logs) / (len(logs) - 1) / len(logs))
    far = T_95[min(len(logs) - 1, len(T_95) - 1)] * error
    return math.exp(middle), math.exp(middle - far), math.exp(middle + far)


def spread(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float]:
    """Lowest and highest over the seeds."""
    values = [row[key] for row in rows if row[key] is not None]
    return (min(values), max(values)) if values else (math.inf, math.inf)


def over_best(cells: Mapping[str, Rows], policy: str) -> list[float]:
    """The policy's p90 TTFT over the best of each cell."""
    return [
        mean(rows[policy], KEY) / min(mean(found, KEY) for found in rows.values())
        for rows in cells.values()
        if policy in rows
    ]


def geometric(values: Sequence[float]) -> float:
    """Mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def summary_table(cells: Mapping[str, Rows], policies: Sequence[str]) -> str:
    """One line a policy."""
    lines = [
        "| policy | p90 TTFT over the best (geometric mean) | at worst | first or within 3 % | hit ratio (mean) | "
        "E2E p50 over the default |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for policy in policies:
        ratios = over_best(cells, policy)
        hits = sum(mean(rows[policy], "hit_ratio") for rows in cells.values()) / len(cells)
        whole = geometric(
            [mean(rows[policy], "e2e_p50_s") / mean(rows[DEFAULT], "e2e_p50_s") for rows in cells.values()]
        )
        near = sum(ratio <= NEAR for ratio in ratios)
        name = f"**{policy}**" if policy == DEFAULT else policy
        lines.append(
            f"| {name} | {geometric(ratios):.2f} | {max(ratios):.1f} | {near} of {len(ratios)} | {hits:.1%} | "
            f"{whole:.2f} |"
        )
    return "\n".join(lines)


def lost(cells: Mapping[str, Rows]) -> list[tuple[float, str, str]]:
    """Cells in which the default is more than 3 % behind: how far, which, and who was first."""
    found = []
    for name, rows in cells.items():
        best = min(rows, key=lambda policy: mean(rows[policy], KEY))
        ratio = mean(rows[DEFAULT], KEY) / mean(rows[best], KEY)
        if ratio > NEAR:
            found.append((ratio, name, best))
    return sorted(found, reverse=True)


def lost_table(cells: Mapping[str, Rows]) -> str:
    """The cells in which the default is not first."""
    lines = [
        "| cell | default, p90 TTFT s | first, p90 TTFT s | behind [95 %] | hits, default and first | E2E p50 over the "
        "first | probable cause |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for _, name, best in lost(cells):
        own, other = cells[name][DEFAULT], cells[name][best]
        hits = f"{mean(own, 'hit_ratio'):.0%}, {mean(other, 'hit_ratio'):.0%}"
        whole = mean(own, "e2e_p50_s") / mean(other, "e2e_p50_s")
        lines.append(
            f"| {name} | {interval(own)} | {best} {interval(other)} | {apart(own, other)} | {hits} | {whole:.2f} | "
            f"{why(name)} |"
        )
    return "\n".join(lines)


def apart(own: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> str:
    """How far behind, with its interval."""
    middle, low, high = behind(own, other)
    return f"{middle - 1:.0%} [{low - 1:.0%}, {high - 1:.0%}]"


def overload_table(cells: Mapping[str, Rows], policies: Sequence[str]) -> str:
    """Requests served well a second in the cells beyond capacity."""
    lines = ["| cell | " + " | ".join(policies) + " |", "|---|" + "---:|" * len(policies)]
    for name, rows in cells.items():
        best = max(mean(found, "goodput") for found in rows.values())
        row = []
        for policy in policies:
            value = mean(rows[policy], "goodput")
            text = f"{value:.3g} ({mean(rows[policy], 'slo_attained'):.0%})"
            row.append(f"**{text}**" if value * NEAR >= best else text)
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def interval(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean p90 TTFT, with the lowest and highest of the seeds."""
    low, high = spread(rows, KEY)
    return f"{mean(rows, KEY):.3g}" if low == high else f"{mean(rows, KEY):.3g} ({low:.3g} to {high:.3g})"


def why(name: str) -> str:
    """The first cause that fits a cell."""
    return next(cause for word, cause in CAUSES.items() if word in name)


def hit_table(cells: Mapping[str, Rows]) -> str:
    """Cells in which the default's hit ratio is below 95 % of the best one that keeps up."""
    lines = [
        "| cell | default | best of those within 1.5 times the default's p90 TTFT | its p90 TTFT over the default's |",
        "|---|---:|---|---:|",
    ]
    for name, rows in cells.items():
        own = mean(rows[DEFAULT], "hit_ratio")
        bound = 1.5 * mean(rows[DEFAULT], KEY)
        fit = {
            policy: mean(found, "hit_ratio") for policy, found in rows.items() if mean(found, KEY) <= bound
        }
        best = max(fit, key=lambda policy: fit[policy])
        if own < 0.95 * fit[best]:
            slower = mean(rows[best], KEY) / mean(rows[DEFAULT], KEY)
            lines.append(f"| {name} | {own:.1%} | {best} {fit[best]:.1%} | {slower:.2f} |")
    return "\n".join(lines) if len(lines) > 2 else "None."


def cell_table(cells: Mapping[str, Rows], policies: Sequence[str]) -> str:
    """p90 TTFT and hit ratio of every policy in every cell."""
    lines = ["| cell | " + " | ".join(policies) + " |", "|---|" + "---:|" * len(policies)]
    for name, rows in cells.items():
        best = min(mean(found, KEY) for found in rows.values())
        row = []
        for policy in policies:
            value = mean(rows[policy], KEY)
            text = f"{value:.3g} ({mean(rows[policy], 'hit_ratio'):.0%})"
            row.append(f"**{text}**" if value <= best * NEAR else text)
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def plots(cells: Mapping[str, Rows], policies: Sequence[str], folder: Path) -> None:
    """Write the SVG files."""
    folder.mkdir(parents=True, exist_ok=True)
    colours = {policy: COLOURS[at % len(COLOURS)] for at, policy in enumerate(policies)}
    capped = [Bar(p, min(geometric(over_best(cells, p)), 10.0), colours[p]) for p in policies]
    (folder / "policies-overall.svg").write_text(
        bars(
            "p90 TTFT over the best of each cell", capped, x_title="geometric mean over all cells, cut at 10"
        )
    )
    named: dict[str, Callable[[str], bool]] = {
        "workload": lambda name: "8 engines, 70%" in name and name.count(",") == 2,
        "trouble": lambda name: name.endswith(("lag", "mixed", "node", "stalls", "perturbed")),
    }
    for word, belongs in named.items():
        part = {name: rows for name, rows in cells.items() if belongs(name)}
        if part:
            values = [Bar(p, min(geometric(over_best(part, p)), 10.0), colours[p]) for p in policies]
            title = f"p90 TTFT over the best: {'each workload at 70 %' if word == 'workload' else 'cells with trouble'}"
            (folder / f"policies-{word}.svg").write_text(
                bars(title, values, x_title="geometric mean, cut at 10")
            )
    hits = [
        Bar(p, sum(mean(rows[p], "hit_ratio") for rows in cells.values()) / len(cells), colours[p])
        for p in policies
    ]
    (folder / "policies-hits.svg").write_text(
        bars("Prompt tokens found in the cache", hits, x_title="mean over all cells", percent=True)
    )


def page(found: Mapping[str, Rows], policies: Sequence[str], seeds: int) -> str:
    """The whole page."""
    cells = {name: rows for name, rows in found.items() if not beyond(name)}
    over = {name: rows for name, rows in found.items() if beyond(name)}
    losses = lost(cells)
    clearly = sum(behind(cells[name][DEFAULT], cells[name][best])[1] > 1.0 for _, name, best in losses)
    verdict = (
        f"`{DEFAULT}` is first or within 3 % of the first in p90 time to first token in {len(cells) - len(losses)} of "
        f"{len(cells)} cells, and {geometric(over_best(cells, DEFAULT)):.2f} times the best of each cell in the "
        f"geometric mean; the next policy is at "
        f"{min(geometric(over_best(cells, p)) for p in policies if p != DEFAULT):.2f}. "
        + (
            f"In {clearly} of the others the difference is beyond chance (95 % over the seeds; the first is known only "
            f"afterwards). Geometric means of {seeds} seeds (two where 128 engines run); in brackets the lowest and highest."
            if seeds > 1
            else "One seed."
        )
    )
    return "\n\n".join(
        [
            HEAD.rstrip(),
            "## In short",
            verdict,
            "![overall](img/policies-overall.svg) ![hits](img/policies-hits.svg)",
            summary_table(cells, policies),
            "![workloads](img/policies-workload.svg) ![trouble](img/policies-trouble.svg)",
            "## Where the default is not first",
            "By p90 TTFT; the cells beyond capacity have a table of their own below.",
            lost_table(cells),
            NOTES.strip(),
            "## Where its hit ratio is below 95 % of the best",
            "Among policies that keep up with its latency. Where the last number is above 1 the default gave hits away for "
            "earlier first tokens:",
            hit_table(cells),
            "## Beyond capacity",
            "At 120 % of what least-requests can do, with `admission` that refuses what cannot begin within two seconds: "
            "requests a second that got their first token within two seconds and the others within 100 ms each (share of "
            "all that came). Bold: first or within 3 %. Caches that are used well raise the capacity.",
            overload_table(over, policies),
            "## Every cell",
            "p90 time to first token in seconds, and hit ratio. Bold: first or within 3 %.",
            cell_table(cells, policies),
            "Policies of other gateways are written from their published algorithms; each file in "
            "`extproc/replay/peers/` names its source. They are compared by their formulas: all see the core's own view of "
            "the caches, and none has its gateway's overhead.\n",
        ]
    )


def main() -> None:
    """Write page and plots."""
    parser = argparse.ArgumentParser(description="docs/policies.md from the grid's results.")
    parser.add_argument("results", type=Path)
    parser.add_argument("docs", type=Path)
    wanted = parser.parse_args()
    found = json.loads(wanted.results.read_text())
    cells: dict[str, Rows] = found["cells"]
    policies = [policy for policy in COMPARED if all(rows.get(policy) for rows in cells.values())]
    (wanted.docs / "policies.md").write_text(page(cells, policies, found["seeds"]))
    plots({name: rows for name, rows in cells.items() if not beyond(name)}, policies, wanted.docs / "img")


if __name__ == "__main__":
    main()
