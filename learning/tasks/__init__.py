"""Embedded tasks: where their prompts come from and how responses to them are scored.

Lives here: letter chains, one-sentence answers, GSM8K's rule.
Must not live here: reward models and users' functions (`learning.rewards`).
"""
