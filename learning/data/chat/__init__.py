"""Conversations: messages and their keys, templates, masks, end tokens; what a model reads and what it has written.

Lives here: turns into token ids and back, with the model's own template.
Must not live here: files and their rows (`learning.data`).
"""
