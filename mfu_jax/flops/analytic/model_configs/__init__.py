"""`ModelConfig`: the sizes that FLOPs and parameters are counted from, one group per concern."""
