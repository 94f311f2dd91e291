"""Prompts and rows for supervised training: read from tasks, files and data sets, tokenised, handed out in order.

Lives here: sources, fields, templates, filters, the data cursor.
Must not live here: how a response is scored (`learning.rewards`).

`data_files` says which files, `raw_records` reads records, `prompt_rows` (or `supervised_rows`) makes rows of them,
`prompt_tokens` with `chat/` writes and tokenises them, `prompts` keeps what a run takes.
"""
