"""Keys that are taken at start only are named when an edit changes them."""

from __future__ import annotations

from extproc.config.schema import Settings
from extproc.edge.live_config import waiting_for_a_start


def test_a_changed_start_only_key_is_named_and_a_live_one_is_not() -> None:
    before = Settings()
    after = Settings.model_validate({"listen": {"admin": "127.0.0.1:1"}, "logging": {"requests": True}})
    assert waiting_for_a_start(before, after) == ["listen"]
    assert waiting_for_a_start(before, Settings()) == []
