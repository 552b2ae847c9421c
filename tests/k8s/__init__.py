"""The chart and the gateway's discovery on a real API server with simulated nodes."""
