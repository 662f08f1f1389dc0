"""Token mixers with a state: the gated delta net."""
