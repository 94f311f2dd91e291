"""What an actor keeps out of collections: not what it was forked with, again and again, but what is its own."""

import json

from forked_script import output_of

SCRIPT = """
import gc, json, weakref

class Ring:
    def __init__(self):
        self.own = self

# what forks has imported it, too
from rlhfspec.actors.remote.actor_start import set_heap_aside

gc.disable()
found = weakref.ref(Ring())
gc.freeze()

own = weakref.ref(Ring())
set_heap_aside()
looked_at = [found() is None, own() is None]
held = Ring()
last = weakref.ref(held)
set_heap_aside()
del held
print(json.dumps([*looked_at, last() is not None]))
set_heap_aside()
print(json.dumps(last() is None))
"""


def test_what_a_fork_found_set_aside_stays_there_and_what_it_set_aside_itself_goes_with_its_last_use() -> (
    None
):
    first, then = map(json.loads, output_of(SCRIPT).splitlines())
    assert first == [False, True, True] and then is True
