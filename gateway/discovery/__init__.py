"""Where the replicas of a service are. Everything else watches here and takes whatever changes."""
