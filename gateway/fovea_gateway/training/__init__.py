"""Models: their commands run strictly by seq_id, one after another."""
