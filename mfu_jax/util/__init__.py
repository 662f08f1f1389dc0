"""Small tools open to every room: each knows nothing of what the project counts."""
