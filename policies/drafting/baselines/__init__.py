"""Drafting policies to compare with: off, fixed, by batch size, by capacity, a bandit.

Lives here: rules that read no measured cost.
Must not live here: anything that the goodput policy needs.
"""
