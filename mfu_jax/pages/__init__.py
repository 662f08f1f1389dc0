"""Self-contained HTML pages in one file: no network, no server."""
