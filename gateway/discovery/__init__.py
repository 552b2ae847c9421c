"""Where the services are. Everything else asks here and takes whatever changes."""
