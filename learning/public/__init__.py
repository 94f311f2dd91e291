"""What users' scripts import: every package in here is also `rlhfspec.NAME`, such as `rlhfspec.integrations`.

Lives here: one module for each trainer that can call our engine.
Must not live here: what only our own runs need.
"""
