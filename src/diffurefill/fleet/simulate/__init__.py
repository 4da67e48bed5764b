"""The fleet's own worker and merger in virtual time, under every fault a hub and its users cause.

`chaos.run_seed` runs one seed; the same seed gives the same trace on any machine.
"""
