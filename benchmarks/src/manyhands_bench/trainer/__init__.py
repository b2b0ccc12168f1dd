"""Measurements of what trainers offer beside training: each equal to one device."""
