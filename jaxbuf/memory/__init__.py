"""What every memory shares: who owns the rows of a pool."""
