"""The main job on one machine: text in, a fleet that loses members, a model that writes."""

from diffurefill.demo.run import run_demo

__all__ = ["run_demo"]
