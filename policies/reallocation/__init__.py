"""Which unfinished samples to move, where to, and how (RLHFSpec, arXiv 2512.04752, section 5).

Lives here: reallocation policies, expected lengths and finish times, the gate between shipping and prefilling again.
Must not live here: the protocol that moves a sample (`policies.migration`).
"""
