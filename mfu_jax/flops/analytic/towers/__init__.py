"""Vision and audio encoders that stand beside a decoder."""
