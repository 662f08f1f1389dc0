"""Turns a config into a list of layers: one small function per family, listed in `families`."""
