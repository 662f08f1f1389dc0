"""Traces as stored in their file: protobuf, planes, lines, events."""
