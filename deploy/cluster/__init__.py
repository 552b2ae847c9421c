"""A real Kubernetes control plane on this machine, with simulated nodes, from binaries that it builds itself."""
