"""Who gets which version: by a hash of the session, so that a client stays where it is."""

from __future__ import annotations

import xxhash

from extproc.release.plan import Plan


def place(plan: Plan, key: str) -> float:
    """Where a client stands in this release, from 0 up to 1. Other releases shuffle anew, so that it is not always the
    same clients who come first."""
    salted = f"{plan.pool}\0{plan.baseline}\0{plan.candidate}\0{key}".encode()
    return float(xxhash.xxh3_64_intdigest(salted)) / 2.0**64


def version_at(plan: Plan, share: float, key: str) -> str:
    """The version of a client while ``share`` of them have the candidate. As the share grows clients only move to the
    candidate, as it shrinks only away from it."""
    return plan.candidate if place(plan, key) < share else plan.baseline
