"""Sessions: what a client opens, keeps alive and ends."""
