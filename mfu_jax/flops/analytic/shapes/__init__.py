"""The sizes that FLOPs and parameters are counted from."""
