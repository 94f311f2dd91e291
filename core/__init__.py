"""What every layer shares: records that cross a boundary, config, errors, metric names, files written whole.

Lives here: definitions without behaviour of their own, and the smallest helpers.
Must not live here: anything that knows models, torch or Ray.
Rooms (imports go left): settings <- surfaces
"""
