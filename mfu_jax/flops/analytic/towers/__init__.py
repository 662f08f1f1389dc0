"""Vision and audio encoders beside a decoder."""
