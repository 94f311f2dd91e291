"""The page of a run: one HTML file of its own, from the run folder alone.

Lives here: what the page shows, where its marks stand, the template.
Must not live here: reading of files that others read too (`cluster.folder`, `cluster.observe`).
"""
