"""Settings for every test."""

from hypothesis import settings

# A loaded machine is no failure: tests assert results, never times.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
