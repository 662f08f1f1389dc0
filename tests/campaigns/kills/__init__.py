"""Kills of training jobs: the goodput that is reported beside what the killer saw."""
