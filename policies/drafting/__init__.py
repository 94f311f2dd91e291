"""How many draft tokens to propose and to verify at each decode step (RLHFSpec, arXiv 2512.04752, section 4).

Lives here: what a policy is; the goodput law, its estimators, searches and cadence; proposals; replay; `baselines`.
Must not live here: drafting itself (`engine.drafters`), the measured cost and acceptance models (`profiles`).
"""
