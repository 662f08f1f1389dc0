"""`ModelConfig`: the sizes that determine FLOPs and parameters, one group per concern."""
