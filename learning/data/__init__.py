"""Prompts: read from tasks, files and data sets, tokenised, handed out with keys that are never reused.

Lives here: sources, templates, filters, the data cursor.
Must not live here: how a response is scored (`learning.rewards`).
"""
