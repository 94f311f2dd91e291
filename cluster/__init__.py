"""The RL loop over Ray actors, and the command line.

Lives here: the loop on one page, the system it runs on, one package for each concern around it.
Must not live here: actors (`actors`), decisions (`policies`), maths (`learning`).
Rooms (imports go left): folder <- ray_start <- observe <- report <- plan <- verify <- weights <- system <-
resume <- run <- serving <- jobs <- commands
"""
