"""Many plans of one model: which settings fit, which are fastest, with few compiles."""
