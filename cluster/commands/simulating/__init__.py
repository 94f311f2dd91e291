"""Commands below `rlhfspec simulate`.

Lives here: their arguments, what they print.
Must not live here: simulations (`policies.simulate`).
"""
