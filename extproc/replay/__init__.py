"""Traces, a virtual-time driver, peers' policies, reports."""
