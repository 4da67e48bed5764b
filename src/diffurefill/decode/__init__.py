"""Canvas -> text, by draft and refill."""
