"""What users of other trainers expect of this one, measured."""
