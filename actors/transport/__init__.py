"""Transports: how the bytes of a migrating sample get from one instance to another.

Lives here: channels over the Ray object store, Gloo and NCCL; frames with checksums.
Must not live here: what is sent and when (`actors.migration`).
"""
