"""The processes of a job compared: which host is slow, at what, and which one is not heard."""
