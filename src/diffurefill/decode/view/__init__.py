"""A canvas while it is filled: in a terminal, as a page, as a GIF."""
