"""Settings for every test."""

from hypothesis import settings

from diffurefill import runtime

# A loaded machine is no failure: tests assert results, never times.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# By itself no test computes in bf16, whatever this CPU has: exact results are compared. Not by a
# fixture, which would come too late for those of a module.
runtime.cpu_has_bf16 = lambda: False
