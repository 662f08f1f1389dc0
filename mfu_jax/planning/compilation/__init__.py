"""Compiles a step for chips that are not attached, in a child process."""
