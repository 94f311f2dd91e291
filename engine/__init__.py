"""Tree speculative decoding on torch: what one instance needs to turn prompts into completions.

Lives here: the engine, its decode step, admission of samples, their hand-over to other engines. The parts are packages.
Must not live here: Ray, the choice of how much to draft (`policies`), anything that learns (`learning`).
Rooms (imports go left): attention <- cache <- weights <- decoding <- model <- drafters <- cpu <- cuda <- group
<- calibration
"""
