"""Decisions: how much to draft, which samples to move. Pure, seeded, replayable."""
