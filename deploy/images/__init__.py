"""The images of deploy/docker, built and run by podman on a machine that reaches no image registry."""
