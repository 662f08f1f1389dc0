"""Custom calls whose FLOPs the HLO text does not show: cuDNN, Mosaic, and a registry."""
