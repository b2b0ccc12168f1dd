"""One GPU by manyhands beside plain PyTorch on it."""
