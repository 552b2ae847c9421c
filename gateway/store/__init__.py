"""What survives a restart: typed access to the rows, by noun."""
