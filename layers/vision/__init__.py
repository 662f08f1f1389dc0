"""Vision towers: images become tokens in the text."""
