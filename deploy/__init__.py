"""How Fovea gets onto machines: images, the Helm chart, and a real API server to try it on."""
