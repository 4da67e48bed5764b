"""Rows -> trained weights."""
