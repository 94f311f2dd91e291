"""What was measured of a model pair on a machine: cost and acceptance models, recorded drafts, step logs.

Lives here: fits, their quality, their files, the provenance that a profile must match.
Must not live here: measuring (`engine.calibration`), deciding (`policies.drafting`).
"""
