"""Adapters for trainers of other people: one module each, which imports that library.

Nothing else in this package imports them (docs/clients.md).
"""
