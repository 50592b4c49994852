"""Which passes run, in which order, and what is done about one that fails."""
