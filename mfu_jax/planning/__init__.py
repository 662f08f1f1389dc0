"""Predicts the time and memory of a step on chips that are not attached."""
