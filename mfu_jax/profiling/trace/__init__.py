"""Traces as their file has them: protobuf, planes, lines, events."""
