"""Keeps every measurement and decision of the tuner, and saves what can be read of a damaged store."""
