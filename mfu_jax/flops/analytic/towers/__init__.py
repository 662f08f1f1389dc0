"""Vision and audio encoders of multimodal decoders."""
