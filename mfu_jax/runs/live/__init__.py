"""A live run in a terminal: follows its metrics file and draws it as one frame."""
