"""Measurements of sums among devices: built-in messages beside process groups of PyTorch."""
