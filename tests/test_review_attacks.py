"""The attacks of an outside review, each repeated against today's code, and each kind of leak planted once to see that it is caught.

`HELD` names the test that is the attack, here or in another file; `KINDS` are the twelve kinds of leak, broken on purpose; `MUTANTS` the
changes to the kernel that no test had noticed. The numbers are those of the review."""

import ast
import hashlib
import json
import math
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import fresh
import pytest
import torch
from planted import Bug, buffers_left_as_they_are, named_test, raw_gradients_in_the_loss, rows_padded_already
from test_boundary import made
from test_training import engine, interrupted, net, run_all, tune

import dpft
from dpft import Full, account, charges, guarantee, ledger, loop, sampling, store, verification
from dpft.boundary import differing, given_out, neighbours, toy_pictures
from dpft.engine import Engine
from dpft.frost.magnitude import sensitivity
from dpft.gradients import Block, gradients
from dpft.identity import fingerprint
from dpft.loop import Run
from dpft.method import Method, bounded_rows
from dpft.noise import Keystream, secure_std
from dpft.plan import noise_spread, scaled_blocks
from dpft.privacy import Request, SampledGaussian
from dpft.step import Draws
from dpft.store import CheckpointError, Store

DATA = toy_pictures()

HELD = {
    "P1 a digest of the data in what is saved": ["test_review_attacks:test_the_saved_folder_does_not_tell_two_data_sets_apart",
                                                 "test_guarantee:test_what_is_published_depends_on_neither_data_nor_other_runs_nor_digests"],
    "P2 draws that are used again": ["test_ledger:test_four_runs_with_the_same_draws_cost_one_step_of_half_the_noise",
                                     "test_ledger:test_a_budget_sees_that_draws_are_shared",
                                     "test_training:test_a_checkpoint_of_something_else_is_refused",
                                     "test_review_attacks:test_equal_seeds_do_not_draw_alike"],
    "P3 a loss that depends on the padding": ["test_boundary_gradients:test_a_loss_that_depends_on_the_padding_is_refused",
                                              "test_boundary_gradients:test_a_late_shape_is_looked_at_too"],
    "P4 parameters of the loss": ["test_boundary_gradients:test_a_parameter_of_the_loss_is_refused_by_its_name_and_gets_no_gradient",
                                  "test_review_attacks:test_an_optimizer_holds_nothing_outside_the_model"],
    "P5 buffers": ["test_boundary:test_a_buffer_that_the_forward_pass_writes_is_not_given_away",
                   "test_boundary_gradients:test_a_buffer_is_after_a_pass_what_it_was_before"],
    "P6 a search, and a shared ledger": ["test_tuning:test_under_selection_nothing_tells_how_many_trials_there_were_or_which_won",
                                         "test_ledger:test_what_is_published_shows_the_runs_own_rows_and_nothing_else",
                                         "test_guarantee:test_a_selection_does_not_say_whether_there_were_other_runs"],
    "P7 secrets that stay": ["test_review_attacks:test_a_loop_by_hand_leaves_no_secret",
                             "test_review_attacks:test_no_secret_stays_when_the_evaluation_fails"],
    "P8 batches twice, copied, foreign, halved": ["test_review_attacks:test_a_step_takes_its_own_batches_each_once",
                                                  "test_units:test_a_batch_that_the_step_did_not_give_is_refused"],
    "P9 people without a name": ["test_schema:test_a_row_without_a_person_is_refused_and_counted",
                                 "test_schema:test_missing_people_in_tensors_and_frames_are_refused"],
    "P10 another model beside the guarantee": ["test_guarantee:test_weights_card_and_claims_are_bound",
                                               "test_guarantee:test_weights_that_are_relisted_break_the_seal"],
    "P11 a run that is stopped early": ["test_review_attacks:test_a_run_that_is_stopped_states_its_plan",
                                        "test_guarantee:test_a_stopped_run_states_the_epsilon_of_its_plan"],
    "P12 losses in messages and on the screen, people on both sides": [
        "test_boundary_gradients:test_a_loss_that_depends_on_the_padding_is_refused",
        "test_boundary:test_progress_shows_nothing_of_the_data",
        "test_tuning:test_people_are_compared_by_the_column_that_names_them",
        "test_training:test_no_loss_is_kept_or_shown_unless_it_is_asked_for"],
    "K1 norms that cancel": ["test_float_bound:test_two_tokens_that_nearly_cancel_have_no_norm_that_is_too_small",
                             "test_float_bound:test_nor_is_such_an_example_released_beyond_the_bound",
                             "test_float_bound:test_no_sequence_of_tokens_is_released_beyond_the_bound"],
    "K2 a paid run that is lost": ["test_review_attacks:test_a_run_is_saved_before_its_secret_goes",
                                   "test_saving:test_a_place_is_checked_before_anything_is_paid_for"],
    "K5 the random state of other devices": ["test_boundary_gradients:test_other_devices_generators_are_left_alone"],
    "K6 one folder for two processes": ["test_review_attacks:test_two_processes_do_not_share_a_folder"],
    "K6 sizes in a tensor": ["test_review_attacks:test_sizes_may_come_in_a_tensor"],
    "K6 long gradients in half the bits": ["test_float_bound:test_a_long_gradient_of_equal_numbers_is_measured_right"],
}       # K3 and K4 are costs: the chapter on cost counts the noise, and a draw asks the device once

MUTANTS = {  # what was changed -> the test that notices
    "a second request gets the noise of the first": "test_review_attacks:test_each_request_has_the_noise_of_its_own_multiplier",
    "a checkpoint may be ahead of its ledger": "test_review_attacks:test_a_checkpoint_ahead_of_its_ledger_is_refused",
    "inner products in bfloat16": "test_float_bound:test_factors_that_half_precision_would_shorten_are_measured_in_full",
    "the ledger does not wait for the disk": "test_review_attacks:test_the_ledger_waits_for_the_disk",
    "secure mode without its own deviation": "test_review_attacks:test_secure_mode_adds_the_noise_of_the_grid_to_every_block",
    "finite block by block": "test_review_attacks:test_an_example_that_is_not_finite_in_one_block_is_silent_in_all",
}


@pytest.mark.parametrize("name", sorted({test for tests in HELD.values() for test in tests} | set(MUTANTS.values())))
def test_every_test_that_is_named_is_there(name):
    file, test = name.split(":")
    tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text())
    assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


# the attacks that had no test of their own ----------------------------------------------------------------------------------------


def test_the_saved_folder_does_not_tell_two_data_sets_apart(tmp_path):
    "P1: who knows all records but one hashes both candidates, and was right in 6 of 6 folders at epsilon 0.5."
    made(DATA, epsilon=0.5, ledger=tmp_path / "ledger.sqlite", output=tmp_path / "saved")
    content = b"".join(path.read_bytes() for path in sorted((tmp_path / "saved").rglob("*")) if path.is_file())
    for candidate in (DATA, neighbours(DATA)["without it"]):
        plain = fingerprint(candidate)
        for guess in (plain, hashlib.sha256(plain.encode()).hexdigest(), hashlib.sha256(bytes.fromhex(plain)).hexdigest()):
            assert guess[:16].encode() not in content and bytes.fromhex(guess)[:8] not in content


def first_draw(loop):
    e = engine(seed=0, loop=loop, steps=1)
    return torch.cat([batch[0].flatten() for batch in next(iter(e))])


def test_equal_seeds_do_not_draw_alike():
    "P2: four runs with one seed had the same draws; now a run's other settings enter its stream."
    one, again, other = (first_draw(f"learning rate {rate}") for rate in (0.1, 0.1, 0.2))
    assert torch.equal(one, again) and (len(one) != len(other) or not torch.equal(one, other))


def test_an_optimizer_holds_nothing_outside_the_model():
    "P4: an instance that holds a temperature trained it on gradients that nothing had bounded."
    model, temperature = net(), torch.nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="parameters outside the model"):
        tune(model, optimizer=torch.optim.SGD([*model.parameters(), temperature], 0.1))


def test_a_loop_by_hand_leaves_no_secret(tmp_path=None):
    "P7: after all steps of an engine with a checkpoint the key of the noise lay there, and the guarantee did not say so."
    with nullcontext(tmp_path) if tmp_path else tempfile.TemporaryDirectory() as folder:
        e = run_all(engine(checkpoint=folder))
        assert not (Path(folder) / "run.json").exists() and e.guarantee.secrets == []


def test_no_secret_stays_when_the_evaluation_fails(tmp_path):
    "P7: an evaluation that raised left the key and the state, and no run."
    def failing(model):
        raise RuntimeError("no accuracy today")

    with pytest.warns(UserWarning, match="evaluate= failed"):
        run = tune(checkpoint=tmp_path, evaluate=failing)
    assert not {"run.json", "state.pt"} & {path.name for path in tmp_path.iterdir()} and run.guarantee.secrets == []


@pytest.mark.parametrize("unit", [None, [row // 2 for row in range(60)]], ids=["rows", "people"])
def test_a_step_takes_its_own_batches_each_once(unit):
    "P8: the same batch twice moved the sum by 2 C, fifty copies of a row by 50.7 C, and nothing was said."
    e = engine(unit=unit, batch_size=20 if unit is None else 10)
    step = next(iter(e))
    batches = list(step)
    images, labels = batches[0]
    with pytest.raises(RuntimeError, match="drawn already"):
        list(step)
    for wrong in ((images.clone(), labels.clone()), (images[:1], labels[:1]), (images[:1].expand(50, 1, 4, 4), labels[:1].expand(50))):
        with pytest.raises(ValueError, match="takes the batches that it yields, each once"):
            step.add(wrong)
    step.add(batches[0])
    with pytest.raises(ValueError, match="takes the batches that it yields, each once"):
        step.add(batches[0])


@pytest.mark.parametrize("unit", [None, [row // 2 for row in range(60)]])
def test_a_step_refuses_the_batches_of_another_draw(unit):
    "At another rate, under another name, or of an earlier step, they are drawn otherwise than is charged."
    e = engine(unit=unit, batch_size=20 if unit is None else 10, steps=2, physical_batch_size=4)
    steps = iter(e)
    step = next(steps)
    own = list(step)
    for other in (e.batches(1.0, "mine"), e.batches(1.0, "train", 0), e.batches(e.plan.sample_rate, "train", 1)):
        with pytest.raises(ValueError, match="takes the batches that it yields, each once"):
            step.add(next(iter(other)))
    e.draws.open = []
    step.drawn, step.left = False, 0
    own = list(step)
    for batch in own:
        step.add(batch)
    step.privatize()
    step.done()
    with pytest.raises(ValueError, match="takes the batches that it yields, each once"):
        next(steps).add(own[1])                          # left over from the step before


def test_a_step_takes_no_copy_of_its_own_draw():
    "The same draw made a second time gives the same examples, and a batch of it in place of its twin counted twice."
    def again(e):
        return e.batches(e.plan.sample_rate, "train", 0, views=True)

    e = engine(batch_size=60, steps=1, physical_batch_size=40)
    step = next(iter(e))
    own = list(step)
    step.add(own[0])
    with pytest.raises(ValueError, match="takes the batches that it yields, each once"):
        step.add(next(again(e)))
    step.add(own[1])                                                     # what was only looked at takes nothing away
    step.privatize()
    e = engine(batch_size=60, steps=1, physical_batch_size=30)           # two that were begun, one within the other
    step = next(iter(e))
    first, second = iter(step), again(e)
    next(first), next(second)
    late = next(first)
    with pytest.raises(ValueError, match="takes the batches that it yields, each once"):
        step.add(late)



def centred(batch):
    batch["x"] -= batch["x"].mean(0)


def centred_anew(batch):
    batch["x"] = batch["x"] - batch["x"].mean(0)


@pytest.mark.parametrize("change", [centred, centred_anew, lambda batch: batch.update(more=torch.ones(len(batch["x"]))),
                                    lambda batch: batch["y"].fill_(0)])
def test_a_batch_that_was_changed_after_it_was_given_out_is_refused(change):
    "From the second step on nobody looked, and one row in the mean moved the sum by nine bounds."
    class Rows:
        def __len__(self):
            return 24

        def __getitem__(self, row):
            return {"x": torch.full((3,), float(row)), "y": row % 2}

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    e = dpft.Engine(torch.nn.Linear(3, 2), loss_fn, Full(), Rows(), noise_multiplier=1.0, batch_size=24, steps=2, clip=0.1, delta=1e-3,
                    seed=0, accountant="rdp")
    steps = iter(e)
    next(steps).take()
    step = next(steps)
    batch = next(iter(step))
    change(batch)
    with pytest.raises(ValueError, match="was changed after the step gave it out"):
        step.add(batch)


@pytest.mark.parametrize("sensitivity", [0.0, -1.0, math.nan, math.inf])
def test_a_release_without_a_bound_is_refused(sensitivity):
    "With sensitivity 0 no noise was added, and epsilon stayed what it was."
    class Odd(Method):
        def requests(self, context):
            return [Request(0.5, 1, 0.2)]
        def start(self, context):
            context.release(sum(batch[0].sum(0) for batch in context.draw(0.5)), sensitivity)
            context.train_only(context.body)
    with pytest.raises(ValueError, match="sensitivity"):
        engine(method=Odd(), epsilon=1.0)


class Releases(Full):
    "Releases a sum that it is given, whatever the draw."

    def __init__(self, total, sensitivity):
        self.total, self.sensitivity, self.noisy = total, sensitivity, None

    def requests(self, context):
        return [Request(0.5, 1, 0.2)]

    def start(self, context):
        super().start(context)
        assert [*context.draw(0.5)]
        self.noisy = context.release(self.total.clone(), self.sensitivity)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16, torch.bfloat16, torch.int64])
def test_a_sum_that_noise_does_not_cover_is_refused(dtype):
    "Imaginary parts went out bare, and beside 4096 in bfloat16 noise of 0.04 is none."
    with pytest.raises(ValueError, match="float32 or float64"):
        engine(method=Releases(torch.full((8,), 4096.0).to(dtype), 0.01), epsilon=1.0)


@pytest.mark.parametrize("value", [1e8, -1e30, math.inf])
def test_noise_does_not_vanish_beside_a_large_sum(value):
    method = Releases(torch.full((1000,), value), 0.1)
    engine(method=method, epsilon=1.0)
    assert method.noisy.std() > 0.1 and method.noisy.unique().numel() > 4
    honest = Releases(torch.full((1000,), 1e4), 0.1)
    engine(method=honest, epsilon=1.0)
    assert abs(honest.noisy.mean() - 1e4) < 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_more_row_moves_bounded_rows_by_the_bound_at_most(dtype):
    "In half precision the sum stood still, and then leapt by 64 bounds."
    for values in (torch.ones(401, 64), torch.rand(401, 64) * 100, torch.full((401, 4), 300.0), torch.full((401, 1), 3e4)):
        sums = [bounded_rows(values[:rows].to(dtype), 1.0).double() for rows in range(360, 402)]
        assert max((y - x).norm().item() for x, y in pairwise(sums)) <= 1 + 1e-6
        assert sums[-1].norm() > 300
    odd = torch.tensor([[math.nan, 0.0], [math.inf, 1.0], [3.0, 4.0], [0.0, 0.0]]).to(dtype)
    assert torch.allclose(bounded_rows(odd, 1.0).double(), torch.tensor([0.6, 0.8], dtype=torch.float64))


@pytest.mark.parametrize("mask", [lambda p: torch.full_like(p, 0.5), lambda p: torch.ones_like(p, dtype=torch.int64),
                                  lambda p: torch.ones(1, dtype=torch.bool)])
def test_a_mask_that_is_not_of_truth_values_is_refused(mask):
    "The noise was multiplied by a mask of 0.01, and the sum was not."
    class Soft(Full):
        def blocks(self, context):
            trains = [p for p in context.model.parameters() if p.requires_grad]
            return [Block(trains, masks=[mask(p) for p in trains])]
    with pytest.raises(ValueError, match=r"masks.*torch\.bool"):
        engine(method=Soft(), noise_multiplier=1.0, epsilon=None)


def test_a_run_that_is_stopped_states_its_plan():
    "P11: after 5 of 40 steps the guarantee said 1.12 where 3.00 was planned."
    e = engine(epsilon=3.0, steps=8)
    optimizer = torch.optim.SGD(e.parameters(), 0.1)
    for step in e:
        step.take(optimizer)
        if e.t == 2:
            break
    assert e.guarantee.epsilon() == pytest.approx(e.plan.epsilon(), rel=1e-9) and "before the end of its plan" in e.guarantee.report()


def test_a_run_is_saved_before_its_secret_goes(tmp_path, monkeypatch):
    "K2: a kill between the end of training and the save cost the whole budget again, five times."
    seen, honest = [], Run.save

    def looked(self, path, **knobs):
        seen.append((tmp_path / "state" / "run.json").exists())
        honest(self, path, **knobs)
        seen.append((tmp_path / "state" / "run.json").exists())

    monkeypatch.setattr(Run, "save", looked)
    tune(checkpoint=tmp_path / "state", output=tmp_path / "saved")
    assert seen == [True, True] and not (tmp_path / "state" / "run.json").exists() and (tmp_path / "saved" / "guarantee.json").exists()


def test_two_processes_do_not_share_a_folder(tmp_path):
    "K6: one of two died with a sentence about room on the disk."
    code = ("import sys; from dpft.store import Store, CheckpointError\n"
            "try: Store(sys.argv[1], {}, {})\nexcept CheckpointError as error: print(error)")
    first = Store(tmp_path / "state", {}, {})
    said = fresh.run(code, tmp_path / "state", said=tmp_path / "it").stdout
    assert "another process is using checkpoint" in said and "choose another folder" in said
    first.close()


def test_sizes_may_come_in_a_tensor():
    "K6: a tensor of sizes was a Python error about truth."
    for kind in ("mg", "mgn", "mgna"):
        assert sensitivity(torch.tensor([3, 5, 8]), kind=kind) == sensitivity([3, 5, 8], kind=kind)


# the mutants that nothing had noticed -----------------------------------------------------------------------------------------------

ENTRIES = 40_000


class Two(Full):
    "Asks for two sums of unequal shares, of sums that are zero."

    def requests(self, context):
        return [Request(0.5, 1, 0.5, "cheap"), Request(0.25, 1, 0.05, "dear")]

    def start(self, context):
        super().start(context)
        self.heard = []
        for rate in (0.5, 0.25):
            list(context.draw(rate))
            self.heard.append(context.release(torch.zeros(ENTRIES), 1.0))


def test_each_request_has_the_noise_of_its_own_multiplier():
    "The standard deviation of n normal numbers is off by more than 6 of its deviations, 1 / sqrt(2 n), once in 5e8 tries."
    method = Two()
    e = engine(method=method)
    sigmas = [m.noise_multiplier for m in e.plan.mechanisms[1:]]
    assert sigmas[1] > 1.2 * sigmas[0]
    for heard, sigma in zip(method.heard, sigmas, strict=True):
        assert abs(heard.std().item() / sigma - 1) < 6 / math.sqrt(2 * ENTRIES)


def test_a_checkpoint_ahead_of_its_ledger_is_refused(tmp_path):
    "The ledger knows the run and has fewer steps than the state: rows are missing."
    interrupted(tmp_path, 4)
    known, late = tmp_path / "run.json", (tmp_path / "ledger.sqlite").read_bytes()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as file:
        run, = file.execute("SELECT run FROM ledger WHERE kind = 'begin'").fetchone()
        plan = file.execute("SELECT content, digest FROM ledger WHERE kind = 'begin'").fetchone()
        key = file.execute("SELECT key FROM secret").fetchone()[0]
    assert known.exists() and late
    (tmp_path / "ledger.sqlite").unlink()
    with dpft.Ledger(tmp_path / "ledger.sqlite") as early:      # as it was before the first step
        with early.chain.file.writing():
            early.chain.file.connection.execute("UPDATE secret SET key = ?", (key,))
        early.begin(run, json.loads(plan[0]), draws=plan[1])
    with pytest.raises(ledger.LedgerError, match=r"the checkpoint is at step . but its ledger has only 0 steps"):
        tune(checkpoint=tmp_path, learning_rate=0.05)


def test_the_ledger_waits_for_the_disk(tmp_path):
    "What was charged is on disk before anything is released: 2 is FULL, 3 EXTRA; a power cut cannot be had in a test."
    with dpft.Ledger(tmp_path / "ledger.sqlite") as held:
        assert held.chain.file.connection.execute("PRAGMA synchronous").fetchone()[0] >= 2


def test_secure_mode_adds_the_noise_of_the_grid_to_every_block():
    "By so little more than the multiplier asks for that no sample would show it."
    e = engine(secure_mode=True)
    sigma, clip = e.plan.mechanisms[0].noise_multiplier, e.plan.clip
    wanted = secure_std(sigma * clip, clip, sum(p.numel() for p in e.trains.values()))
    assert wanted > sigma * clip and set(e.spread.values()) == {wanted}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_that_is_not_finite_in_one_block_is_silent_in_all(bad):
    model = torch.nn.Linear(2, 1, bias=True)

    def loss(model, batch):
        return model(batch[0])[:, 0]

    batch = (torch.tensor([[1.0, 2.0], [bad, 1.0]]),)            # the gradient of the bias is 1, that of the weight is not finite
    taken = gradients(model, loss, batch)
    sums, _ = taken.clipped_sum([Block([model.weight], clip=1.0), Block([model.bias], clip=1.0)])
    assert sums["bias"].item() == pytest.approx(1.0, rel=1e-5) and sums["weight"].isfinite().all()


# each kind of leak, planted --------------------------------------------------------------------------------------------------------


def nothing_differs(neighbour="very large", **knobs):
    found = differing(given_out(lambda: made(DATA, **knobs)), given_out(lambda: made(neighbours(DATA)[neighbour], **knobs)))
    assert not found, ", ".join(found)


@contextmanager
def digest_in_the_folder():
    honest = Run.save

    def careless(self, path, **knobs):
        honest(self, path, **knobs)
        (Path(path) / "provenance.txt").write_text(fingerprint(self.prepared.train))

    with patch.object(Run, "save", careless):
        yield


def every_release_by_itself():
    def alone(releases):
        return [SampledGaussian(one.mechanism.noise_multiplier, one.mechanism.sample_rate, 1, one.mechanism.name) for one in releases]

    return patch.object(charges, "by_draw", alone)


def all_rows_published():
    honest = ledger.published_rows
    return patch.object(ledger, "published_rows", lambda book, runs: honest(book, book.runs()))


def secrets_stay():
    return patch.object(Engine, "remove_secrets", lambda self: None)


def any_batch():
    return patch.object(Draws, "take", lambda self, batch, *draw: None)


def people_without_names():
    return patch.object(sampling, "Units", Nameless)


class Nameless(sampling.Units):
    "Whoever has no name is a person of that name."

    def __init__(self, ids, name="unit", cap=None):
        super().__init__([repr(one) for one in ids], name, cap)


def files_unread():
    return patch.object(verification, "_files", lambda guarantee, folder: iter(()))


def only_what_was_spent():
    return patch.object(guarantee, "answered_for", lambda spent, planned: list(spent))


@contextmanager
def losses_in_the_history():
    honest = loop.entry_of

    def careless(given, step):
        return honest(given, step) | {"loss": step.tally.loss}

    with patch.object(loop, "entry_of", careless):
        yield


KINDS = [
    Bug("P1 a digest of the data", digest_in_the_folder, nothing_differs),
    Bug("P2 draws charged as if they were others", every_release_by_itself,
        partial(named_test, "test_ledger", "test_four_runs_with_the_same_draws_cost_one_step_of_half_the_noise")),
    Bug("P3 padding", rows_padded_already,
        partial(named_test, "test_boundary_gradients", "test_a_mean_over_all_positions_of_a_batch_is_called_by_its_name")),
    Bug("P4 raw gradients", raw_gradients_in_the_loss,
        partial(named_test, "test_boundary_gradients", "test_one_that_comes_later_is_refused_at_a_new_shape_and_never_gets_a_gradient")),
    Bug("P5 buffers", buffers_left_as_they_are,
        partial(named_test, "test_boundary", "test_a_buffer_that_the_forward_pass_writes_is_not_given_away")),
    Bug("P6 rows of other runs", all_rows_published,
        partial(named_test, "test_ledger", "test_what_is_published_shows_the_runs_own_rows_and_nothing_else")),
    Bug("P7 secrets that stay", secrets_stay, test_a_loop_by_hand_leaves_no_secret),
    Bug("P8 any batch", any_batch, partial(test_a_step_takes_its_own_batches_each_once, None)),
    Bug("P9 people without names", people_without_names,
        partial(named_test, "test_schema", "test_missing_people_in_tensors_and_frames_are_refused")),
    Bug("P10 weights that nobody looks at", files_unread,
        partial(named_test, "test_guarantee", "test_weights_card_and_claims_are_bound", name="model.safetensors", content=b"other weights",
                message="model.safetensors was changed")),
    Bug("P11 the price of what was spent", only_what_was_spent, test_a_run_that_is_stopped_states_its_plan),
    Bug("P12 losses that nobody asked for", losses_in_the_history, partial(nothing_differs, batch_size=24)),
]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_each_kind_of_leak_is_caught_and_the_honest_code_is_not_accused(kind):
    kind.catch()
    with kind.plant(), pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        kind.catch()


def test_the_table_has_all_twelve_kinds():
    assert [kind.name.split()[0] for kind in KINDS] == [f"P{number}" for number in range(1, 13)]
    assert {name.split()[0] for name in HELD} >= {f"P{number}" for number in range(1, 13)} | {"K1", "K2", "K5", "K6"} and len(MUTANTS) == 6
    assert issubclass(CheckpointError, ValueError) and store.CheckpointError is CheckpointError and issubclass(Two, Method)


# ---- a review of the keys of seeded runs


def test_an_identity_that_is_not_complete_has_a_secret_of_its_own():
    "Else one sum would be released under two noises and charged once."
    facts = {"clip": 1.0}, {"data": "ab"}
    whole, part = (Store(None, *facts, seed=0, complete=complete) for complete in (True, False))
    assert whole.secret != part.secret and part.secret == Store(None, *facts, seed=0).secret


def test_what_follows_a_second_sum_shares_no_noise_with_a_run_that_had_none():
    plan = {"mechanisms": [{"name": "train", "noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 4}]}

    def begun():
        store = Store(None, {"clip": 1.0}, {"data": "rows"}, seed=0, complete=True)
        book = ledger.Ledger()
        book.begin(store.run, plan, draws="d")
        return store, book

    def noise(store, book, step, total):
        keystream = Keystream(store.secret)
        key = account.charged(book, store, "train", step, keystream.digest(total))
        return keystream.normal(total.shape, 1.0, "noise", "train", step, key)

    first, second, total = begun(), begun(), torch.ones(5)
    assert torch.equal(noise(*first, 0, total), noise(*second, 0, total))
    replayed = noise(*first, 0, total + 1e-6)
    assert not torch.equal(replayed, noise(*second, 0, total)) and torch.equal(replayed, noise(*first, 0, total + 1e-6))
    assert torch.equal(noise(*first, 0, total), noise(*second, 0, total)), "charged before there was a second sum"
    assert not torch.equal(noise(*first, 1, total), noise(*second, 1, total)), "after it"
    assert torch.equal(noise(*first, 1, total), noise(*first, 1, total))
    assert not torch.equal(noise(*first, 2, total), noise(*first, 2, total + 1)), "two sums never share"


def test_what_takes_the_place_of_a_run_begins_to_move_only_when_all_of_it_can(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_text("old")
    (tmp_path / "b.json").mkdir()
    with pytest.raises(ValueError, match=r"b\.json is a folder, and the run has a file"), store.taking_place(tmp_path) as place:
        for name in ("a.safetensors", "b.json"):
            (place / name).write_text("new")
    assert (tmp_path / "a.safetensors").read_text() == "old"
    (tmp_path / "b.json").rmdir()
    synced, moved, fsync, move = [], [], store.os.fsync, Path.replace
    monkeypatch.setattr(store.os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").resolve().name) or fsync(number))
    monkeypatch.setattr(Path, "replace", lambda path, to: moved.append([*synced]) or move(path, to))
    with store.taking_place(tmp_path) as place:
        for name in ("a.safetensors", "b.json"):
            (place / name).write_text("new")
    assert moved == [["a.safetensors", "b.json"]] * 2 and synced[2:] == [tmp_path.name]


def test_only_a_lock_is_called_a_lock(tmp_path):
    with pytest.raises(FileNotFoundError):
        store.lock(tmp_path / "gone", object())


def test_a_save_that_was_killed_leaves_nothing_after_the_next_and_one_that_still_writes_keeps_its_place(tmp_path):
    code = ("import os, sys; from pathlib import Path; from dpft import store\n"
            "with store.taking_place(Path(sys.argv[1])) as place:\n"
            "    (place / 'half').write_text('of a model'); print(place.name, flush=True); sys.stdin.read(1)")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        left = tmp_path / other.stdout.readline().strip()
        with store.taking_place(tmp_path) as place:
            (place / "whole").write_text("a model")
        assert (left / "half").exists() and (tmp_path / "whole").exists(), "the other process is not done"
        other.kill()
    assert left.exists()
    with store.taking_place(tmp_path):
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_the_names_of_new_folders_are_on_disk_before_a_run_begins(tmp_path, monkeypatch):
    synced, fsync = [], store.os.fsync
    monkeypatch.setattr(store.os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").resolve()) or fsync(number))
    held = Store(tmp_path / "new" / "run", {}, {}, seed=1)
    assert {tmp_path, tmp_path / "new", tmp_path / "new" / "run"} <= set(synced)
    held.close()


def test_secure_noise_of_masked_blocks_is_no_smaller_than_the_plan_asks():
    "The spread of a masked block was rounded to float32, below what the grid needs."
    parameter, mask = torch.nn.Parameter(torch.zeros(10)), torch.arange(10) < 7
    for sigma in torch.arange(0.5, 1.5, 0.01).tolist():
        halves = [Block([parameter], [mask], 0.7, 0.7**0.5), Block([parameter], [~mask], 0.3, 0.3**0.5)]
        blocks = scaled_blocks(halves, [parameter], 0.1, sigma)
        spread = noise_spread(blocks)[id(parameter)]
        assert spread[0].item() == blocks[0].noise and spread[9].item() == blocks[1].noise
