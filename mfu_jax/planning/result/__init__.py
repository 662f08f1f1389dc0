"""A plan: time, memory, what limits the step and what would help; as text and as a page."""
