"""Figures of a trainer that people can move to."""
