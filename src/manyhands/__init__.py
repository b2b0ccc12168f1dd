"""manyhands: one training and inference machine out of the devices people already own."""

__version__ = "0.1.0"
