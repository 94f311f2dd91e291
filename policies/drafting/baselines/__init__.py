"""Drafting policies to compare with: off, fixed, a bandit.

Lives here: rules that read no measured cost.
Must not live here: anything that the goodput policy needs.
"""
