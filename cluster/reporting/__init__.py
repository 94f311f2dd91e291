"""What a user sees of a run: console, summary, metrics of an iteration, pictures, timelines.

Lives here: text and pictures made from records.
Must not live here: what writes the records (`cluster.folder`).
"""
