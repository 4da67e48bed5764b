"""Rows -> corrupted rows -> loss."""
