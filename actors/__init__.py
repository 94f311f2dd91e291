"""Thin Ray shells around the engine, the learner and the rewards.

Lives here: actors of scheduler, trainer and rewards, the records that only actors exchange; instances in `generation`.
Must not live here: decisions (`policies`), decoding (`engine`), updates (`learning`).
Rooms (imports go left): remote <- transport <- migration <- generation <- reward_server <- workers <- scheduling
"""
