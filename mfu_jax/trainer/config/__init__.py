"""The trainer's configuration: its keys, their rules, the mesh's axes."""
