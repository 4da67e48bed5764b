"""`diffurefill bench ...`: what a preset's training costs on this machine, and where it goes; and
what kept keys and values cost a model."""

from diffurefill.commands.bench.attention import BenchAttention
from diffurefill.commands.bench.cache import BenchCache
from diffurefill.commands.bench.optimizer import BenchOptimizer
from diffurefill.commands.bench.train import BenchTrain

__all__ = ["BenchAttention", "BenchCache", "BenchOptimizer", "BenchTrain"]
