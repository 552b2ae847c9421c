"""The images of deploy/docker, built and run with podman on a machine that cannot reach an image registry."""
