"""A fleet that loses members."""
