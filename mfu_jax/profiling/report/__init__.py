"""A profile, or two of them, as text."""
