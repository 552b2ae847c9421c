"""The chart and the gateway's discovery on a real API server, whose nodes are simulated."""
