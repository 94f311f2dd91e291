"""Prompts and rows for supervised training: read from tasks, files and data sets, tokenised, handed out in order.

Lives here: sources, fields, templates, filters, the data cursor.
Must not live here: how a response is scored (`learning.rewards`).
"""
