"""Laws of the decode loop: one order log, at-least-once outbox, failures reach everyone. No Ray."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from fake_engine import POISON, FakeEngine, FakeHost, make_request, response_of

from rlhfspec.actors.generation import decode_loop
from rlhfspec.actors.generation.decode_loop import DecodeLoop
from rlhfspec.actors.generation.loop_orders import CutOrder, HoldOrder, LoadOrder, StopOrder, SubmitOrder
from rlhfspec.core.errors import DataError, RlhfSpecError
from rlhfspec.core.records import FinishReason
from rlhfspec.core.weight_records import WeightManifest


class Running:
    """A decode loop on its thread."""

    def __init__(self, *, report_interval_s: float = 0.0, **engine) -> None:
        self.engine = FakeEngine("gen-0", **engine)
        self.host = FakeHost(self.engine)
        self.loads = []
        self.loop = DecodeLoop(
            "gen-0", self.host, report_interval_s=report_interval_s, on_report=self.loads.append
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except ZeroDivisionError as error:
            self.error = error

    def order(self, order):
        return self.loop.order(order).result(timeout=10)

    def submit(self, *indices: int) -> None:
        self.order(SubmitOrder(requests=tuple(make_request(i) for i in indices)))

    def collect(self, count: int):
        done, acknowledged = {}, 0
        while len(done) < count:
            reply = self.loop.poll(acknowledged=acknowledged, wait_s=10)
            acknowledged = reply.sequence
            done |= {c.key.sample_index: c for c in reply.completions}
        return done


@pytest.fixture
def running():
    made = []

    def make(**engine) -> Running:
        made.append(Running(**engine))
        return made[-1]

    yield make
    for item in made:
        item.loop.order(StopOrder())
        item.thread.join(timeout=10)
        assert not item.thread.is_alive()


def manifest(version: int) -> WeightManifest:
    return WeightManifest(
        model="target",
        weight_version=version,
        checksum="c",
        num_bytes=0,
        chunk_num_bytes=(),
        chunk_checksums=(),
        tensors=(),
        hf_config_json="{}",
    )


def test_submitted_samples_are_returned_by_polls(running):
    loop = running()
    loop.submit(3, 11, 6)
    done = loop.collect(3)
    assert {i: c.token_ids.tolist() for i, c in done.items()} == {
        i: response_of(i).tolist() for i in (3, 11, 6)
    }


def test_a_completion_is_given_again_until_it_is_acknowledged(running):
    loop = running()
    loop.submit(0)
    first = loop.loop.poll(acknowledged=0, wait_s=10)
    again = loop.loop.poll(acknowledged=0, wait_s=10)
    after = loop.loop.poll(acknowledged=first.sequence, wait_s=0)
    assert [c.key for c in first.completions] == [c.key for c in again.completions]
    assert len(first.completions) == 1 and after.completions == ()


def test_the_long_poll_of_an_idle_instance_ends_when_it_gets_work(running):
    loop = running(step_s=0.2)
    with ThreadPoolExecutor(1) as other:
        poll = other.submit(loop.loop.poll, acknowledged=0, wait_s=60)
        loop.submit(6)
        # sooner than the sample, whose seven steps would have ended it as well
        assert poll.result(timeout=30).completions == ()


def test_statistics_are_reported_when_the_last_sample_has_moved_away():
    engine = FakeEngine("gen-0")
    loop = DecodeLoop("gen-0", FakeHost(engine), report_interval_s=3600.0)
    loop.order(SubmitOrder(requests=(make_request(6),)))
    for _ in range(3):
        loop.run_once(wait_s=0.0)
    engine.running.clear()
    loop.run_once(wait_s=0.0)
    load = loop.poll(acknowledged=0, wait_s=0).load
    assert load.num_running == 0 and load.stats.num_emitted_tokens == 3


def test_orders_are_logged_in_one_order_at_growing_boundaries(running, caplog):
    caplog.set_level(logging.DEBUG, logger=decode_loop.__name__)
    loop = running()
    loop.submit(1)
    loop.order(LoadOrder(manifest=manifest(4), chunks=()))
    loop.submit(2)
    boundaries, texts = zip(*(record.args[1:] for record in caplog.records), strict=True)
    assert [str(text) for text in texts] == ["submit 1@0", "load target version 4", "submit 2@0"]
    assert list(boundaries) == sorted(boundaries)
    assert loop.host.loaded == [4]


def test_an_idle_loop_passes_no_step_boundaries(running):
    loop = running()
    loop.submit(0)
    loop.collect(1)
    loop.order(HoldOrder(term=0))
    boundary = loop.loop.boundary
    loop.loop.poll(acknowledged=1, wait_s=0.2)
    assert loop.loop.boundary - boundary <= 1


def test_a_refused_order_reaches_its_caller_and_the_loop_goes_on(running):
    loop = running()
    with pytest.raises(DataError, match="does not fit"):
        loop.order(SubmitOrder(requests=(make_request(1, prompt_tokens=101),)))
    loop.submit(2)
    assert list(loop.collect(1)) == [2]


def test_a_failing_step_reaches_pollers_waiting_orders_and_later_orders(running):
    loop = running(poisoned=True)
    loop.order(HoldOrder(term=0))
    loop.submit(POISON)
    with pytest.raises(ZeroDivisionError):
        loop.loop.poll(acknowledged=0, wait_s=10)
    loop.thread.join(timeout=10)
    assert isinstance(loop.error, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        loop.submit(1)


def test_a_stopped_loop_refuses_orders(running):
    loop = running()
    loop.order(StopOrder())
    loop.thread.join(timeout=10)
    with pytest.raises(RlhfSpecError, match="stopped"):
        loop.submit(1)


def test_samples_before_weights_are_refused(running):
    loop = running()
    loop.host.engine = None
    with pytest.raises(RlhfSpecError, match="before its weights"):
        loop.submit(1)


def test_progress_and_load_are_published_between_steps(running):
    loop = running(step_s=0.01)
    loop.submit(6)
    loop.collect(1)
    assert [load.num_running for load in loop.loads][-1] == 0
    assert max(load.num_running for load in loop.loads) == 1
    assert loop.loads[-1].stats.num_emitted_tokens == 7


def test_a_completion_is_reported_before_the_next_report_of_the_state(running):
    loop = running(step_s=0.01, report_interval_s=3600.0)
    loop.submit(3, 11)
    first = loop.loop.poll(acknowledged=0, wait_s=10)
    assert [c.key.sample_index for c in first.completions] == [3]
    num_told = len(loop.loads)
    # out of work the whole state is told
    loop.collect(2)
    assert len(loop.loads) == num_told + 1
    assert loop.loads[-1].num_running == 0 and loop.loads[-1].stats.publish_s > 0.0


def test_held_are_open_samples_and_completions_not_yet_acknowledged(running):
    loop = running()
    loop.submit(0, 1)
    loop.collect(2)
    loop.collect(2)
    held = loop.order(HoldOrder(term=1))
    assert (held.instance, held.open_epochs, held.sequence) == ("gen-0", {}, 2)
    assert {c.key.sample_index for c in held.completions} == {0, 1}
    loop.loop.poll(acknowledged=held.sequence, wait_s=0)
    assert loop.order(HoldOrder(term=1)).completions == ()


def test_open_samples_are_held_under_the_epoch_of_their_order(running):
    loop = running(step_s=0.2)
    request = replace(make_request(6), epoch=3)
    loop.order(SubmitOrder(requests=(request,)))
    assert loop.order(HoldOrder(term=1)).open_epochs == {request.key: 3}


def test_samples_of_a_replaced_scheduler_are_not_taken(running, caplog):
    caplog.set_level(logging.DEBUG, logger=decode_loop.__name__)
    loop = running()
    loop.order(HoldOrder(term=2))
    loop.order(SubmitOrder(requests=(make_request(1),), term=1))
    assert loop.order(HoldOrder(term=1)).open_epochs == {} and not loop.engine.has_work
    loop.order(SubmitOrder(requests=(make_request(2),), term=2))
    assert list(loop.collect(1)) == [2]
    assert [record.getMessage().split(": ")[1] for record in caplog.records][1] == "submit 1@0 in term 1"


def test_an_order_to_cut_ends_the_samples_it_names_and_no_others(running):
    loop = running(step_s=0.2)
    submit = SubmitOrder(requests=(make_request(6), make_request(7)))
    # nobody waits in between: seven steps lie between the one and its end
    futures = [loop.loop.order(one) for one in (submit, CutOrder(keys=frozenset({make_request(6).key})))]
    done = loop.collect(2)
    assert all(future.result(timeout=10) is None for future in futures)
    assert done[6].finish_reason is FinishReason.CUT and done[7].finish_reason is FinishReason.STOP
    assert done[6].num_tokens < len(response_of(6)) and loop.loop.open_epochs == {}


def test_an_order_to_cut_that_comes_late_cuts_nothing(running):
    loop = running()
    turn = replace(make_request(6), key=replace(make_request(6).key, turn=1))
    loop.order(CutOrder(keys=frozenset({make_request(6).key})))
    loop.loop.order(SubmitOrder(requests=(turn,)))
    loop.order(CutOrder(keys=frozenset({make_request(6).key})))
    assert loop.collect(1)[6].finish_reason is FinishReason.STOP
    # nor does one of a scheduler that has been replaced
    loop.order(HoldOrder(term=2))
    loop.loop.order(SubmitOrder(requests=(make_request(6),), term=2))
    loop.order(CutOrder(keys=frozenset({make_request(6).key}), term=1))
    assert loop.collect(1)[6].finish_reason is FinishReason.STOP


class Settling:
    """A migrator with a move whose verdict has not come."""

    is_busy, set_aside = True, {}

    def tick(self) -> None:
        pass

    before_step = tick

    def after_step(self, ended) -> None:
        pass


def test_weights_wait_for_a_copy_whose_move_is_being_settled():
    engine = FakeEngine("gen-0")
    migrator = Settling()
    loop = DecodeLoop("gen-0", FakeHost(engine), report_interval_s=0.0, make_migrator=lambda own: migrator)
    loop.order(SubmitOrder(requests=(make_request(6),)))
    loading = loop.order(LoadOrder(manifest=manifest(1), chunks=()))
    for _ in range(3):
        loop.run_once(wait_s=0.0)
        assert not loading.done() and engine.has_work
    # the verdict: another owns it
    engine.running.clear()
    loop.run_once(wait_s=0.0)
    assert loading.done()
