"""A tightly coupled network made into groups of channels that rarely speak to each other (DECNN, Scheme 1)."""
