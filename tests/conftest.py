"""Settings of all tests."""

from hypothesis import settings

# A busy machine is no counterexample.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
