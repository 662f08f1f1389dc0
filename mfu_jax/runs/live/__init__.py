"""A run that goes on, in a terminal: its metrics file is followed, and drawn as one frame."""
