"""Decisions: how much to draft, which samples to move, who owns them. Pure, seeded, replayable.

Lives here: policies, state machines and the simulator that tries them; events and numbers in, decisions out.
Must not live here: clocks, threads, tensors, torch, Ray.
Rooms (imports go left): drafting <- reallocation <- migration <- scaling <- scheduling <- staleness <- simulate
"""
