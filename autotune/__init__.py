"""Measures whole variants, gates them by accuracy, and remembers the evidence."""
