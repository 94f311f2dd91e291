"""Configs of other trainers as ours: `rlhfspec convert`.

Lives here: how their files and launch scripts are read, and a table of their keys for each trainer.
Must not live here: what our own keys mean and default to (`core.settings`).
"""
