"""What all REST routes stand on: connections, bodies, answers."""
