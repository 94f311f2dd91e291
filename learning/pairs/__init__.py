"""Makes model pairs: the embedded demo pair, and target, draft and tokenizer from a user's text.

Lives here: growing, training and distilling small models.
Must not live here: what an RL run trains (`learning.learner`, `learning.draft_refit`).
"""
