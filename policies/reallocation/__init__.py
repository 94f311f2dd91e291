"""Which unfinished samples to move, where to, and how (design 3.3; RLHFSpec, arXiv 2512.04752, section 5)."""
