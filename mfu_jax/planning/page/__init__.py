"""Plans and sweeps as HTML pages."""
