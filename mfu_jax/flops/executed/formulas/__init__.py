"""FLOPs of one HLO instruction or library routine, by formula."""
