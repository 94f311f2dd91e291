"""Measures a profile on a live engine: what drafting and verifying cost here, how drafts are accepted.

Lives here: timing sweeps, recorded drafts, the description of what was measured.
Must not live here: the fitted models and their file format (`profiles`).
"""
