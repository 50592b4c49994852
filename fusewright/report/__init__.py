"""What a person reads: explanations, benchmark tables, tuning decisions."""
