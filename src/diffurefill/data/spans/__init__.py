"""Which stretches of a text are masked whole: names and numbers, collocations."""
