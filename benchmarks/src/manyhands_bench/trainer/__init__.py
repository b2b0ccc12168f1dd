"""Measurements of what users of other trainers expect of this one."""
