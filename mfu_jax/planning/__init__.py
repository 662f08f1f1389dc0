"""How fast and how big a step would be on chips that are not here."""
