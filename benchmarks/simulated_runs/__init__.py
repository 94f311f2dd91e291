"""The cluster simulator beside runs of this machine: what is measured beforehand, what is predicted, how far it is off.

Lives here: runs that were recorded, profiles with the other cores idle and busy, predictions, deviations.
Must not live here: published figures (benchmarks/published); anything fitted to a figure that it is compared with.
"""
