"""Text -> rows."""
