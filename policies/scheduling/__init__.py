"""The central scheduler: open samples, living instances, ownership.

Lives here: the scheduler's state machine, its events and orders, the ledger, the arbiter of moves.
Must not live here: Ray and timers (`actors.scheduling`), which samples are worth moving (`policies.reallocation`).
"""
