"""Deployment of Fovea: images, the Helm chart, and a real Kubernetes API server for tests."""
