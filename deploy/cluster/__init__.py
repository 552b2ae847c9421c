"""A real Kubernetes control plane on this machine with simulated nodes, from binaries built here."""
