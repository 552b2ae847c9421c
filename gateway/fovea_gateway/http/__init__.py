"""Building blocks of the REST API: connections, request bodies, endpoints."""
