"""Canvas -> logits."""
