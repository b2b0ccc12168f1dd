"""Puts this folder on the path, so that every test can import what hand_made.py makes."""
