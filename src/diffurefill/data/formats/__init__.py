"""Bytes -> rows of text, from any mark on, in bounded memory."""
