"""Compares the processes of a job: which host is slow, at what, and which one is missing."""
