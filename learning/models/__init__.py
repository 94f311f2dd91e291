"""Models to start from: known ones, got by name, and pairs that the project trains itself.

Lives here: the list of known models, their sources, growing, training and distilling small ones.
Must not live here: what an RL run trains (`learning.training`).
"""
