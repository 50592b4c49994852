"""Recognises what a subgraph means, by data flow, and proves each replacement."""
