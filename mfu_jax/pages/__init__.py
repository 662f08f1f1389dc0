"""HTML pages of one file that need nothing else: no network, no server."""
