"""An instance of several ranks: a model dealt to them, a cache that all see, and one engine, on the first rank.

Lives here: the leader's orders, sums and choices over the ranks, and a rank that follows.
Must not live here: decisions (the engine makes them, on the leader); how processes start and meet (`actors`).
"""
