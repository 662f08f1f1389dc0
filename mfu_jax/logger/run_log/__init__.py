"""One append-only log per process, and what follows it: the log's files and every sink."""
