"""When work runs: training commands of a model strictly by seq_id, samples side by side."""
