"""Sessions of clients, and the futures of the work that they submit."""
