"""Drafters: what proposes the tokens that the target verifies.

Lives here: what a drafter is, a draft model, look-up, lists of drafters, the refinement of a draft while it grows.
Must not live here: how much to draft (`policies.drafting`), whether a draft is accepted (`engine.decoding`).
"""
