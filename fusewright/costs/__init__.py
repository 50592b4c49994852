"""What computations cost, by arithmetic rather than by the clock."""
