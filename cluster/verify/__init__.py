"""What: the proof of a run, from its folder alone: samples generated again, rewards computed again, checksums compared.

Lives here: `rlhfspec verify` and the sample view of `rlhfspec replay`, without Ray.
Must not live here: writing into a run folder; how samples are generated (`engine/`).
"""
