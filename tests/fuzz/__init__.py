"""What comes from outside, mutated: no process may die of it, and no answer blame us."""
