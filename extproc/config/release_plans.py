"""Releases and shadow traffic as the core wants them, from the settings."""

from __future__ import annotations

from extproc.config.schema import Settings
from extproc.config.schema.release import ReleaseSettings
from extproc.config.schema.shadow import ShadowSettings
from extproc.release.plan import Guards, Plan, Step
from extproc.release.shadow import ShadowPlan


def release_plans(settings: Settings) -> list[Plan]:
    """The releases of all pools."""
    return [_release(name, said.release) for name, said in settings.pools.items() if said.release is not None]


def shadow_plans(settings: Settings) -> list[ShadowPlan]:
    """The shadows of all pools."""
    return [_shadow(name, said.shadow) for name, said in settings.pools.items() if said.shadow is not None]


def _release(pool: str, said: ReleaseSettings) -> Plan:
    guards = said.guards
    return Plan(
        pool=pool,
        baseline=said.baseline,
        candidate=said.candidate,
        steps=tuple(Step(step.percent / 100.0, step.hold) for step in said.steps),
        guards=Guards(
            errors=None if guards.errors is None else guards.errors / 100.0,
            ttft=guards.ttft,
            quality=guards.quality,
            alpha=guards.false_rollbacks / 100.0,
            min_samples=guards.min_samples,
        ),
        pin_header=said.pin_header,
    )


def _shadow(pool: str, said: ShadowSettings) -> ShadowPlan:
    return ShadowPlan(
        pool=pool,
        target=said.pool,
        share=said.percent / 100.0,
        max_concurrent=said.max_concurrent,
        rpm=said.rpm,
        max_duration_s=said.max_duration,
        model=said.model or "",
    )
