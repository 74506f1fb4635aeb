"""Canary state machine and shadow traffic."""
