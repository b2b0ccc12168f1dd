"""Tokens per second of text generation: plain PyTorch in one process, one worker, and two workers in a pipeline."""
