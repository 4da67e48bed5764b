"""Gradients -> updates."""
