"""The live page at `/`. It shows the models, queues, services, samples and errors of this gateway."""
