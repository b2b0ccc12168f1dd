"""A tightly coupled network made into groups of channels that rarely exchange anything (DECNN, Scheme 1)."""
