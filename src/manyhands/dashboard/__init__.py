"""The page of a run: its folder, served to browsers."""
