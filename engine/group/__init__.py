"""An instance of several ranks: model and cache dealt to them by heads, and one engine, on the first rank.

Lives here: collective calls, the leader's orders, sums and choices over the ranks, and a rank that follows.
Must not live here: decisions (the engine makes them, on the leader); how processes start and meet (`actors`).
"""
