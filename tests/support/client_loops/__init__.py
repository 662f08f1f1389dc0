"""Training loops of many kinds, each as its users write it, with its FLOPs worked out by hand."""
