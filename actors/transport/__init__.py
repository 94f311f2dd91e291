"""Transports: how bytes travel between actors: a migrating sample's caches, a version of the weights.

Lives here: channels over the Ray object store, Gloo and NCCL; frames with checksums.
Must not live here: what is sent and when (`actors.migration`).
"""
